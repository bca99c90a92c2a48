"""``python -m openhands.core.main -c RLAgent`` mends a git repository, with a language model on the embedded server."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_repository import REPAIR, passes, repository
from fixing_model import write_fixer
from scripted_model import ScriptedModel
from test_agent_main import PATIENCE, Run, start

from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

SECTIONS = """
[rl]
max_turns = 4
sampling = {{ temperature = 1.0, seed = 7 }}
storage = {{ path = "{folder}/trajectories" }}
"""


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 60)
def test_a_failing_test_is_mended_and_every_token_is_on_record(tmp_path: Path) -> None:
    repository(tmp_path / "workspace")
    assert not passes(tmp_path / "workspace")
    model = write_fixer(
        tmp_path / "model",
        ("execute_bash", {"command": f"{REPAIR} && python3 -m unittest -q"}),
        ("finish", {"message": "The test passes."}),
    )
    config = ServerConfig(model=str(model), served_model_name="fixer", port=0, dtype="float32", threads=1)
    with running_server(config) as url:
        process = start(tmp_path, ScriptedModel(f"{url}/v1"), "fixer", SECTIONS)
        try:
            process.wait(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
    output = (tmp_path / "output.txt").read_text()
    assert passes(tmp_path / "workspace"), output

    trajectory = Run(tmp_path, output, []).trajectory
    assert (trajectory.stop, trajectory.failure) == (StopReason.TERMINATED, None)
    assert (trajectory.task.environment, trajectory.policy.base_model) == ("workspace", "fixer")
    answers = list(trajectory.sampled())
    assert [[call.name for call in answer.message.tool_calls] for answer in answers] == [["execute_bash"], ["finish"]]
    told = [message.content or "" for message in trajectory.messages() if message.role == "tool"]
    assert len(told) == 1 and "OK" in told[0]
    for answer in answers:
        assert answer.tokens is not None and answer.tokens.prompt_ids
        assert len(answer.tokens.sampled_ids) == len(answer.tokens.logprobs) == 2, "a call and the end of the turn"
        assert all(-0.01 < logprob <= 0.0 for logprob in answer.tokens.logprobs)
    assert [answer.tokens and answer.tokens.extends for answer in answers] == [False, True]
    assert "sums.py" in str(trajectory.evidence)
