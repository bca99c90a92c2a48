"""Episodes that begin with a part of another one: what is replayed, kept, compared, and what is played in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.acted import is_replayed
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import Environment
from openhands_rl_plugin.core.records import EpisodeGrowth, PrefixNote, TrajectoryFilter, prefix_of
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Limits,
    Message,
    Node,
    Observation,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rollout.in_process import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.prefix import (
    DIFFERED,
    beginning_of,
    begun_with,
    can_begin_others,
    has_differed,
    plain_start,
    prefix_nodes,
)
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TASK = Task(id="walk@home", environment="grid", limits=Limits(max_turns=4))
REQUEST = EpisodeRequest(task=TASK, run_id="run", group_id="run/walk@home")
WALK = ("right", "right", "down", "down")


class Moved(GridEnvironment):
    """A grid that says something else after ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.taken = steps, 0

    async def step(self, action: Message) -> Observation:
        answer, self.taken = await super().step(action), self.taken + 1
        other = (Message(role="user", content="You are lost."),)
        return answer.model_copy(update={"messages": other}) if self.taken >= self.steps else answer


class World:
    """Sessions of a scripted policy; ``replayed`` makes the environments of requests with a prefix."""

    def __init__(self, script: Sequence[str], storage: FileTrajectoryStorage | None = None) -> None:
        self.script, self.storage = script, storage
        self.replayed: Callable[[], Environment] = GridEnvironment
        self.engines: list[ScriptedEngine] = []

    def engine(self, request: EpisodeRequest) -> ScriptedEngine:
        self.engines.append(ScriptedEngine(self.script))
        return self.engines[-1]

    def environment(self, request: EpisodeRequest) -> Environment:
        return self.replayed() if request.prefix else GridEnvironment()

    def runner(self) -> SessionRunner:
        return SessionRunner(
            make_environment=self.environment,
            make_strategy=lambda request: StandardReActStrategy(),
            make_engine=self.engine,
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model="script",
            storage=self.storage,
        )


async def walked(script: Sequence[str] = WALK, request: EpisodeRequest = REQUEST) -> Trajectory:
    return await World(script).runner().run(request)


async def test_a_prefix_is_replayed_and_only_the_rest_is_sampled() -> None:
    source = await walked()
    request = begun_with(REQUEST, prefix_nodes(source, 2, good=True))
    world = World(("down", "down"))
    played = await world.runner().run(request)
    assert (played.stop, played.failure, played.episode_return) == (StopReason.TERMINATED, None, 1.0)
    assert played.messages() == source.messages(), "the world went the same way"
    assert [is_replayed(node) for node in played.sampled()] == [True, True, False, False]
    assert prefix_of(played) == PrefixNote(trajectory=source.id, turns=2, of=4, good=True)
    assert len(world.engines[0].calls) == 2 and played.usage.calls == 2 and played.usage.steps == 4
    replayed = [node for node in played.sampled() if is_replayed(node)]
    assert all(node.tokens is None and node.policy is None and node.reward == 0.0 for node in replayed)
    first = next(node for node in played.sampled() if not is_replayed(node))
    assert first.tokens is not None and not first.tokens.extends, "its prompt has all that was said before"
    assert prefix_of(source) is None


async def test_the_turns_of_a_prefix_count() -> None:
    source = await walked()
    played = await walked(("left",) * 4, begun_with(REQUEST, prefix_nodes(source, 3, good=True)))
    assert (played.stop, len(played.acted())) == (StopReason.MAX_TURNS, 4)


@given(turns=st.integers(-1, 6))
async def test_a_prefix_leaves_a_turn(turns: int) -> None:
    source = await walked()
    if 0 < turns < 4:
        nodes = prefix_nodes(source, turns, good=False)
        assert sum(node.sampled for node in nodes) == turns and not nodes[-1].sampled
        assert tuple(node.message for node in nodes) == source.messages()[: len(nodes)]
    else:
        with pytest.raises(ValueError, match="no prefix"):
            prefix_nodes(source, turns, good=False)


async def test_what_can_begin_others() -> None:
    source = await walked()
    assert can_begin_others(source)
    assert not can_begin_others(await walked(("right",), request=limited(1))), "a single turn"
    assert not can_begin_others(source.model_copy(update={"stop": StopReason.TIMEOUT}))
    hidden = source.nodes[1].model_copy(update={"message": Message(role="user", content="key: [redacted]")})
    assert not can_begin_others(source.model_copy(update={"nodes": (source.nodes[0], hidden, *source.nodes[2:])}))


def limited(turns: int) -> EpisodeRequest:
    task = TASK.model_copy(update={"limits": Limits(max_turns=turns)})
    return REQUEST.model_copy(update={"task": task})


async def test_groups_are_named_after_their_prefix() -> None:
    source = await walked()
    begun = begun_with(REQUEST, prefix_nodes(source, 2, good=True))
    assert begun.group_id != REQUEST.group_id
    assert beginning_of(begun.group_id, REQUEST.group_id) == (source.id, 2)
    assert beginning_of(REQUEST.group_id, REQUEST.group_id) is None
    assert plain_start(begun) == REQUEST == plain_start(REQUEST) == begun_with(REQUEST, ())
    assert EpisodeRequest.model_validate_json(begun.model_dump_json()) == begun, "worker processes get it as JSON"


async def test_a_world_that_answers_otherwise_gets_a_plain_start(tmp_path: Path) -> None:
    source = await walked()
    async with FileTrajectoryStorage(tmp_path) as storage:
        world = World(WALK, storage)
        world.replayed = lambda: Moved(2)
        plan = RolloutPlan(
            run_id="run", tasks=(TASK,), samples_per_task=2, prefixes={TASK.id: prefix_nodes(source, 3, good=True)}
        )
        played = await roll_out(plan, world.runner(), storage)
        assert [each.failure for each in played] == [None, None] and not any(map(prefix_of, played))
        assert {each.group_id for each in played} == {"run/walk@home"}
        failed = [each async for each, _ in storage.find(TrajectoryFilter(failed=True))]
        assert len(failed) == 2 and all(map(has_differed, failed))
        failure = failed[0].failure
        assert failure is not None and failure.boundary == DIFFERED
        assert "You are lost." in failure.message and "You are at (2, 0)." in failure.message
        again = len(world.engines)
        assert await roll_out(plan, world.runner(), storage) == played
        assert len(world.engines) == again, "nothing is played a second time"


@pytest.mark.parametrize(
    ("recorded", "same"),
    [("1 passed in 0.12s", True), ("2 passed in 0.12s", False), ("1 passed in 3 seconds", True), ("took 5 ms", False)],
)
async def test_only_durations_may_differ(recorded: str, same: bool) -> None:
    class Tests(GridEnvironment):
        said = "1 passed in 0.31s"

        async def step(self, action: Message) -> Observation:
            return Observation(messages=(Message(role="user", content=self.said),))

    source = await walked(("left",) * 4)
    nodes = prefix_nodes(source, 2, good=False)
    told = [n.model_copy(update={"message": Message(role="user", content=recorded)}) for n in nodes]
    prefix: tuple[Node, ...] = (*nodes[:3], told[3], nodes[4], told[5])
    world = World(("left",) * 4)
    world.replayed = Tests
    played = await world.runner().run(begun_with(REQUEST, prefix))
    assert has_differed(played) is not same
    assert "0.31s" in str(played.messages()), "the model sees what the world said now"


class Mortal(FileTrajectoryStorage):
    """A storage that is killed after some writes of an episode."""

    left = 10**6

    async def grow(self, growth: EpisodeGrowth) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("the process was killed")
        await super().grow(growth)


@pytest.mark.parametrize("writes", [1, 2, 3, 4, 5, 6])
async def test_a_killed_episode_with_a_prefix_goes_on(tmp_path: Path, writes: int) -> None:
    request = begun_with(REQUEST, prefix_nodes(await walked(), 2, good=True))
    async with Mortal(tmp_path) as storage:
        storage.left = writes
        with pytest.raises(StorageError):
            await World(("down", "down"), storage).runner().run(request)
        storage.left = 10**6
        world = World(("down", "down")[max(0, (writes - 4) // 2) :], storage)
        played = await world.runner().run(request)
        assert played.failure is None and played.episode_return == 1.0
        assert [is_replayed(node) for node in played.sampled()] == [True, True, False, False]
        assert [each async for each, _ in storage.find()] == [played]
