"""A store and an adapters' folder that version 0.1 wrote, before the package got its rooms, are read as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from openhands_rl_plugin import FileTrajectoryStorage, TrajectoryFilter, cli
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.models.adapters.store import AdapterStore

pytestmark = pytest.mark.contract

WRITTEN = Path(__file__).parent / "version-0.1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, because opening a store may write to it."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "old"))


async def test_every_episode_and_score_is_read_as_it_was_written(old: Path) -> None:
    async with FileTrajectoryStorage(old / "store") as storage:
        found = [
            [trajectory.model_dump(mode="json"), [score.model_dump(mode="json") for score in scores]]
            async for trajectory, scores in storage.find(TrajectoryFilter(finished=None))
        ]
    written = [json.loads(line) for line in (old / "store" / "expected.jsonl").read_text().splitlines()]
    # Parameters of sampling that were not recorded then are unknown.
    expected = [[Trajectory.model_validate(each).model_dump(mode="json"), scores] for each, scores in written]
    assert len(found) == 4 and found == expected


def test_the_commands_show_the_store(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", str(old / "store")]) == 0
    assert cli.main(["show", str(old / "store"), "whole"]) == 0
    assert "whole" in capsys.readouterr().out


def test_versions_pointer_and_probes_are_read(old: Path) -> None:
    store = AdapterStore(old / "adapters")
    first, second = store.versions("shop")
    assert (first.name, first.version, first.parent, first.step) == ("shop-v000001", 1, None, 3)
    assert (second.parent, second.step, second.metrics) == ("shop-v000001", 6, {"loss": 0.25})
    assert Path(second.path) == old / "adapters" / "shop-v000002"
    assert store.current("shop") == first and store.latest("shop") == second
    for adapter in (first, second):
        store.verify(adapter)
        probe = store.probe(adapter)
        assert probe is not None and probe.token_ids == (1, 2, 3)


def test_the_next_version_follows_the_old_ones(old: Path) -> None:
    store = AdapterStore(old / "adapters")
    made = store.create(
        "shop",
        lambda folder: shutil.copytree(WRITTEN / "adapters" / "shop-v000002", folder, dirs_exist_ok=True) and None,
        base_model="tiny",
        parent="shop-v000002",
    )
    assert made.name == "shop-v000003" and store.latest("shop") == made
