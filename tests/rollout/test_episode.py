"""AgentSession: every limit, every failure, and an environment that is always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError, ModelError, StorageError
from openhands_rl_plugin.core.protocols import Environment, LLMEngine
from openhands_rl_plugin.core.records import EpisodeGrowth, trajectory_id
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    Observation,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rollout.episode import AgentSession, SessionRunner, stored_episode
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine, prompt_ids
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

POLICY = PolicyRef(base_model="scripted")


def request(limits: Limits | None = None, **data: Any) -> EpisodeRequest:
    task = Task(id="walk", environment="grid", instruction="be quick", data=data, limits=limits)
    return EpisodeRequest(task=task, run_id="run", group_id="group")


def session(
    environment: Environment, engine: LLMEngine | Sequence[str], limits: Limits | None = None, strategy: Any = None
) -> AgentSession:
    return AgentSession(
        environment=environment,
        strategy=strategy or StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        engine=ScriptedEngine(engine) if isinstance(engine, Sequence) else engine,
        policy=POLICY,
        limits=limits,
    )


class Troubled(GridEnvironment):
    """A grid whose methods first do what a test set: raise, or sleep."""

    def __init__(self, **trouble: BaseException | float) -> None:
        super().__init__()
        self._trouble = trouble
        self.closes = 0

    async def _meet(self, method: str) -> None:
        trouble = self._trouble.get(method)
        if isinstance(trouble, BaseException):
            raise trouble
        if trouble is not None:
            await asyncio.sleep(trouble)

    async def reset(self, task: Task) -> Observation:
        await self._meet("reset")
        return await super().reset(task)

    async def step(self, action: Message) -> Observation:
        await self._meet("step")
        return await super().step(action)

    async def evidence(self) -> JsonObject:
        await self._meet("evidence")
        return await super().evidence()

    async def close(self) -> None:
        self.closes += 1
        await self._meet("close")


async def play(environment: Environment, texts: Sequence[str], limits: Limits | None = None) -> Trajectory:
    return await session(environment, texts, limits).run(request())


async def test_an_episode_that_ends_by_itself():
    environment = GridEnvironment()
    engine = ScriptedEngine(["right", "down"])
    trajectory = await session(environment, engine).run(request(size=2, goal=[1, 1]))
    assert (trajectory.stop, trajectory.failure) == (StopReason.TERMINATED, None)
    assert [node.message.role for node in trajectory.nodes] == ["system", "user", *["assistant", "user"] * 2]
    assert [node.reward for node in trajectory.sampled()] == [0.0, 1.0]
    assert trajectory.episode_return == 1.0
    assert trajectory.evidence == {"final_state": [1, 1], "return": 1.0, "steps": 2}
    assert trajectory.id == trajectory_id(request())
    assert trajectory.usage.calls == trajectory.usage.steps == 2
    assert trajectory.times.started <= trajectory.times.finished
    assert trajectory.policy == POLICY
    assert environment.closed
    assert "be quick" in (engine.calls[0][0].content or ""), "the task's text reaches the model"
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


async def test_max_turns():
    trajectory = await play(GridEnvironment(), ["left"] * 9, Limits(max_turns=5))
    assert trajectory.stop is StopReason.MAX_TURNS
    assert len(list(trajectory.sampled())) == trajectory.usage.steps == 5


async def test_max_prompt_length():
    texts = ["left"] * 50
    unlimited = await play(GridEnvironment(), texts, Limits(max_turns=50))
    limited = await play(GridEnvironment(), texts, Limits(max_turns=50, max_prompt_length=200))
    assert limited.stop is StopReason.MAX_TOKENS
    turns = len(list(limited.sampled()))
    assert 0 < turns < 50
    prompts = [prompt_ids(unlimited.messages(at)[:-1]) for at, node in enumerate(unlimited.nodes) if node.sampled]
    newest = len(prompts[1]) - len(prompts[0])  # only the newest observation has no ids yet and is estimated
    assert len(prompts[turns - 1]) <= 200 + newest
    assert len(prompts[turns]) > 200


async def test_max_obs_length_cuts_and_marks_it():
    class Chatty(GridEnvironment):
        async def step(self, action: Message) -> Observation:
            return Observation(messages=(Message(role="user", content="x" * 100),))

        async def reset(self, task: Task) -> Observation:
            system = Message(role="system", content="rules " * 20)
            return Observation(messages=(system, Message(role="user", content="y" * 41)))

    trajectory = await play(Chatty(), ["go"], Limits(max_turns=1, max_obs_length=10))
    contents = [node.message.content for node in trajectory.nodes]
    assert contents == ["rules " * 20, "y" * 40 + "\n[1 characters cut]", "go", "x" * 40 + "\n[60 characters cut]"]


@pytest.mark.parametrize("method", ["reset", "step"])
async def test_time_runs_out_in_the_environment(method: str):
    environment = Troubled(**{method: 30.0})
    trajectory = await play(environment, ["left"] * 9, Limits(timeout=0.05))
    assert (trajectory.stop, trajectory.failure) == (StopReason.TIMEOUT, None)
    assert environment.closes == 1
    assert trajectory.evidence["steps"] == 0, "evidence is gathered after a time-out too"


@pytest.mark.parametrize("method", ["reset", "step", "evidence"])
@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (InfrastructureError("away"), FailureKind.INFRASTRUCTURE),
        (BadEnvironmentError("nonsense"), FailureKind.ENVIRONMENT),
        (ZeroDivisionError("a bug"), FailureKind.ENVIRONMENT),
        (TimeoutError("its own"), FailureKind.ENVIRONMENT),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_trouble_in_the_environment_is_a_failure_on_the_trajectory(
    method: str, trouble: BaseException, kind: FailureKind
):
    environment = Troubled(**{method: trouble})
    trajectory = await play(environment, ["left"] * 9, Limits(max_turns=2))
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.boundary) == (kind, f"environment.{method}")
    assert trajectory.failure.message == f"{type(trouble).__name__}: {trouble}"
    assert environment.closes == 1


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (ModelError("refused"), FailureKind.MODEL),
        (InfrastructureError("no server"), FailureKind.INFRASTRUCTURE),
        (KeyError("a bug"), FailureKind.MODEL),
    ],
)
async def test_trouble_with_the_model_is_a_failure_on_the_trajectory(trouble: Exception, kind: FailureKind):
    class Refusing(ScriptedEngine):
        async def complete(self, messages: Sequence[Message], **options: Any) -> list[Completion]:
            raise trouble

    environment = Troubled()
    trajectory = await session(environment, Refusing([])).run(request())
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.boundary) == (kind, "strategy.decide")
    assert (trajectory.stop, environment.closes) == (StopReason.ERROR, 1)
    assert len(trajectory.nodes) == 2, "what was seen before is kept"


async def test_the_environment_is_closed_when_the_run_is_cancelled():
    environment = Troubled(step=30.0)
    running = asyncio.create_task(session(environment, ["left"]).run(request()))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert environment.closes == 1


class Mortal(ScriptedEngine):
    """Ends the process, as far as a session can see, at the call after ``left`` of them."""

    def __init__(self, left: int | None = None) -> None:
        super().__init__(lambda messages: "right" if len(messages) // 2 % 2 else "down")
        self.left = left

    async def complete(self, messages: Sequence[Message], **options: Any) -> list[Completion]:
        if len(self.calls) == self.left:
            raise KeyboardInterrupt
        return await super().complete(messages, **options)


async def run_stored(
    storage: FileTrajectoryStorage, engine: LLMEngine, environment: Environment | None = None
) -> Trajectory:
    runner = SessionRunner(
        make_environment=lambda request: environment or GridEnvironment(),
        make_strategy=lambda request: StandardReActStrategy(),
        make_engine=lambda request: engine,
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="scripted",
        storage=storage,
    )
    return await runner.run(request(size=4, goal=[2, 1]))


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileTrajectoryStorage]:
    async with FileTrajectoryStorage(tmp_path, durable=False) as storage:
        yield storage


async def test_an_episode_that_was_killed_keeps_its_completions_and_begins_again(storage: FileTrajectoryStorage):
    with pytest.raises(KeyboardInterrupt):
        await run_stored(storage, Mortal(left=2))
    unfinished = await stored_episode(storage, trajectory_id(request()))
    assert unfinished is not None
    assert (unfinished.stop, len(list(unfinished.sampled()))) == (StopReason.UNFINISHED, 2)
    whole = await run_stored(storage, again := Mortal())
    assert (whole.stop, len(again.calls)) == (StopReason.TERMINATED, 3)
    assert [found async for found, _ in storage.find()] == [whole], "nothing of the killed episode is left"
    assert await run_stored(storage, Mortal(left=0)) == whole, "a finished episode is not run again"


@pytest.mark.parametrize("writes", [0, 2])
async def test_a_storage_that_fails_stops_the_run(
    storage: FileTrajectoryStorage, monkeypatch: pytest.MonkeyPatch, writes: int
):
    grow, left = storage.grow, iter([True] * writes)

    async def failing(growth: EpisodeGrowth) -> None:
        if not next(left, False):
            raise StorageError("the disk is full")
        await grow(growth)

    monkeypatch.setattr(storage, "grow", failing)
    environment = Troubled()
    with pytest.raises(StorageError, match="the disk is full"):
        await run_stored(storage, Mortal(), environment)
    assert environment.closes == 1
