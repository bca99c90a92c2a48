"""``openhands-rl loop`` over localization tasks, with the installed OpenHands: naming the right places is learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixing_model import write_chooser
from git_backend import make_tasks
from needs import needs_bubblewrap
from test_loop_on_repositories import SETTINGS, call, stored

from openhands_rl_plugin import cli
from openhands_rl_plugin.training.loop.plan import LoopState

RIGHT, WRONG = "shop/basket.py::Basket", "shop/basket.py::label"


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_bubblewrap
def test_naming_the_right_places_is_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_tasks(tmp_path)
    answers = [call("finish", message=f"I think it is\n{place}") for place in (RIGHT, WRONG)]
    model = write_chooser(tmp_path / "model", answers, call("finish", message="Done."))
    config = tmp_path / "config.toml"
    config.write_text(SETTINGS.format(folder=tmp_path).replace("held_out = 2", "held_out = 1"))
    words = ["loop", str(rows), "--config", str(config), "--model", str(model), "--run-dir", str(tmp_path / "run")]
    assert cli.main([*words, "--processes", "1"]) == 0
    said = capsys.readouterr()
    state = LoopState.load(tmp_path / "run" / "state.json")
    assert [record.name for record in state.records][-1] == "evaluate-final", said
    found = stored(tmp_path)
    assert len(found) == 1 + 2 * 12 + 1 and not [each for each, _ in found if each.failure]
    for trajectory, scores in found:
        (first,) = next(trajectory.sampled()).message.tool_calls
        (score,) = scores
        assert score.reward_version == "localization-1@1/1/1" and score.detail["by"] == "answer"
        held_out = trajectory.task.split == "heldout"
        assert score.reward is not None and (score.reward > 0.5) == (RIGHT in first.arguments and not held_out)
    last = [each for each, _ in found if each.run_id.endswith("iteration-001")]
    right = [RIGHT in next(each.sampled()).message.tool_calls[0].arguments for each in last]
    assert sum(right) > 9, right
