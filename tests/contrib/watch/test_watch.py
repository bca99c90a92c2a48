"""Learning in use, over a shop, a served model and its stored episodes: from what came in to what is in use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from watched import ALL, current, journal_of, killed_all_the_time, label, look, play, watching_folder, write_config

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.journal import WatchStep
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.evals.runs.run_files import held
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.mark.slow
def test_a_kill_at_any_line_loses_nothing_and_trains_nothing_twice(
    served: tuple[str, str], shopper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, shop=served[0], server=served[1])
    settings = load_settings(config)
    trajectories = asyncio.run(play(settings, "users", 16))
    deaths = asyncio.run(killed_all_the_time(config, shopper))

    entries = journal_of(config)
    assert [entry.step for entry in entries] == ALL and [entry.number for entry in entries] == [*range(1, 9)]
    assert deaths == 2 * len(entries), "before and after every line"
    adapters = AdapterStore(settings.serving.adapters_directory)
    (version,) = adapters.versions(settings.serving.adapter)
    assert current(settings) == version.name and version.parent is None and adapters.probe(version) is not None
    assert version.name in httpx.get(f"{served[1]}/v1/models").text

    gathered = next(entry for entry in entries if entry.step is WatchStep.GATHERED).figures
    good = {each.id for each in trajectories if each.episode_return >= 0.5}
    assert isinstance(gathered["episodes"], dict) and gathered["episodes"].keys() == good
    before, after = (entry.figures["success"] for entry in entries if entry.step is WatchStep.MEASURED)
    assert isinstance(before, dict) and isinstance(after, dict) and len(before) == len(after) == 8

    async def stored() -> list[str]:
        async with FileTrajectoryStorage(settings.storage.directory) as storage:
            return [each.id async for each in storage.summaries(TrajectoryFilter())]

    kept = asyncio.run(stored())
    assert len(kept) == len(set(kept)) == 16 + 8 + 8, "no episode was rolled out twice"

    where = ["--config", str(config)]
    capsys.readouterr()
    assert cli.main(["watch", "rollback", *where]) == 0
    assert capsys.readouterr().out == f"the base model is in use again, {version.name} no more\n"
    assert current(settings) is None
    assert cli.main(["watch", "rollback", *where]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is nothing to roll back from" in line
    asyncio.run(play(settings, "after", 8, served=version.name))
    entries = asyncio.run(look(config, shopper))
    assert entries == [], "what a version did that was taken back is not learnt from"
    assert cli.main(["watch", "rollback", *where, "--to", "1"]) == 0
    assert current(settings) == version.name
    assert cli.main(["watch", "status", *where]) == 0
    assert f"{version.name} is in use" in capsys.readouterr().out


def test_a_candidate_that_does_worse_is_held_back(served: tuple[str, str], shopper: Path, tmp_path: Path) -> None:
    """People say that the bad way is the good one: what they say counts, and the held-out suite does not let it in."""
    config = write_config(tmp_path, shop=served[0], server=served[1], watch="max_episodes = 16")
    settings = load_settings(config)
    trajectories = asyncio.run(play(settings, "users", 16))
    verdicts = [(each.id, float(each.episode_return < 0.5), "ann") for each in trajectories]
    divided = verdicts[0][0]
    asyncio.run(label(settings, [*verdicts, (divided, 1 - verdicts[0][1], "bob")]))
    entries = asyncio.run(look(config, shopper))
    assert [each.step for each in entries] == [*ALL[:6], WatchStep.HELD, WatchStep.JUDGED]
    assert "1 wait: labels contradict each other" in entries[1].said
    assert "was held back: held-out suite" in entries[6].said
    assert current(settings) is None
    (version,) = AdapterStore(settings.serving.adapters_directory).versions(settings.serving.adapter)
    assert version.name not in httpx.get(f"{served[1]}/v1/models").text, "it is not served any more"
    assert asyncio.run(look(config, shopper)) == [], "the same episodes are not trained on again"
    back = ["watch", "rollback", "--config", str(config), "--to", "1"]
    assert (cli.main(back), current(settings)) == (0, version.name), "a person may insist on it"


def test_trouble_is_one_line_and_the_next_look_goes_on(
    served: tuple[str, str], shopper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = "http://127.0.0.1:9"
    config = write_config(tmp_path, shop=served[0], server=served[1])
    settings = load_settings(config)
    words = ["watch", "--config", str(config), "--model", str(shopper), "--processes", "0"]
    assert cli.main(words) == 0, "the suite is frozen"
    before = journal_of(config)

    with held(watching_folder(settings)):
        assert cli.main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "another `openhands-rl watch` is at work here" in line
        assert cli.main(["watch", "rollback", "--config", str(config)]) == 1
    with held(settings.storage.directory / "watch"):
        assert cli.main(words) == 1, "nor two of different adapters on one store"
        capsys.readouterr()

    for more, expected in (
        ('[rl.watch]\nsuite = ""', "[rl.watch] suite: there is nothing to measure candidates on"),
        (f'[rl.serving]\nbase_url = "{away}/v1"', "127.0.0.1:9"),
        ('[rl.serving]\nbase_url = ""', "[rl.serving] base_url: no model server is named"),
        ("[rl.watch]\ntasks = 3", "[rl.watch] suite: its tasks are others than those"),
    ):
        other = tmp_path / "other.toml"
        other.write_text(f"{config.read_text()}\n{more.replace('[rl', '[extended.rl')}\n")
        assert cli.main([*words[:2], str(other), *words[3:]]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line
    assert journal_of(config) == before and before[0].step is WatchStep.FROZEN
