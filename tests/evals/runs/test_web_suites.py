"""Servers of others as suites: from the settings through OpenHands' controllers to the outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openenv_wire import Socket, openenv_server

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.evals.runs.evaluate import evaluate
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.run_files import Outcome
from openhands_rl_plugin.evals.runs.suites import EvalTask, find_suite, tasks_of
from openhands_rl_plugin.evals.swe.instances import VerdictKind
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SUITE = find_suite("environment")
WALK = script([{"text": f"Action: {move}"} for move in ("RIGHT", "DOWN") * 4])


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with instant_model() as url:
        yield url


async def outcomes_of(
    config: Path,
    model: str,
    entries: Sequence[EvalTask],
    out: Path,
    *,
    name: str = "org/instant",
    store: Path | None = None,
    **more: Any,
) -> list[Outcome]:
    plan_fields = {each: more.pop(each) for each in [*more] if each in EvaluationPlan.model_fields}
    serving = ServingSettings(model=name, base_url=model)
    own = {"serving": serving, "max_workers": 2, "max_turns": 12, "max_prompt_length": 8000, **more}
    settings = load_settings(config).model_copy(update=own)
    plan = EvaluationPlan(
        suite=SUITE, agent="RLAgent", settings=settings, out=out, timeout=60.0, llm_retries=1, **plan_fields
    )
    outcomes: list[Outcome] = []
    async with FileTrajectoryStorage(store or plan.out / "trajectories") as storage:
        await evaluate(plan, entries, storage=storage, started=lambda _: outcomes.append)
    return sorted(outcomes, key=lambda each: each.instance_id)


def write_config(path: Path, *lines: str) -> Path:
    (path / "config.toml").write_text("\n".join(["[rl]", *lines]) + "\n")
    return path / "config.toml"


async def report_the_walk(to: Socket, message: dict[str, Any]) -> bool:
    """The first observation is a text: what the model will say."""
    if message["type"] == "reset":
        shown = {"prompt": WALK, "metadata": {}}
        await to.send_json({"type": "observation", "data": {"observation": shown, "reward": None, "done": False}})
    return message["type"] == "reset"


async def test_openenv(model: str, tmp_path: Path):
    async with openenv_server(report_the_walk) as server:
        config = write_config(tmp_path, 'env_name = "openenv/grid_world"', f'env_server_base = "{server.url}"')
        entries = tasks_of(SUITE, load_settings(config).env_name, 3)
        outcomes = await outcomes_of(config, model, entries, tmp_path / "out", name="org/base", served="policy-v000007")
    async with FileTrajectoryStorage(tmp_path / "out" / "trajectories") as storage:
        policies = [found.policy async for found, _ in storage.find()]
    assert policies == [PolicyRef(base_model="org/base", adapter="policy", version=7)] * 3
    assert [each.instance_id for each in outcomes] == [f"openenv__grid_world-{at}" for at in range(3)]
    assert [each.turns for each in outcomes] == [8] * 3
    assert [each.reward for each in outcomes] == pytest.approx([0.3] * 3)
    assert {each.kind for each in outcomes} == {VerdictKind.UNRESOLVED}
    resets = [message["data"]["seed"] for message in server.messages if message["type"] == "reset"]
    assert sorted(resets) == [0, 1, 2]


async def test_an_episode_of_another_strategy_is_not_taken_for_its_own(model: str, tmp_path: Path):
    async with openenv_server(report_the_walk) as server:
        config = write_config(tmp_path, 'env_name = "openenv/grid_world"', f'env_server_base = "{server.url}"')
        entries = tasks_of(SUITE, "openenv/grid_world", 1)
        (first,) = await outcomes_of(config, model, entries, tmp_path / "first", store=tmp_path / "store")
        assert await outcomes_of(config, model, entries, tmp_path / "again", store=tmp_path / "store") == [first]
        search = {"store": tmp_path / "store", "rollout_strategy": "BestOfN"}
        with pytest.raises(ConfigError, match=r"with another StandardReAct, not this BestOfN: .*--note"):
            await outcomes_of(config, model, entries, tmp_path / "other", **search)
        (noted,) = await outcomes_of(config, model, entries, tmp_path / "other", **search, note="best")
    assert noted.turns == first.turns
