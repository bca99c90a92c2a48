"""The parts of the asynchronous loop by themselves: the buffer's bound, the lineage, the router."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_server import raw_server, respond
from shopping_loop import TASKS, make_plan

from openhands_rl_plugin.core.errors import InfrastructureError, PublishError
from openhands_rl_plugin.core.types import Message, Node, PolicyRef, Score, Trajectory
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.training.loop.plan import is_too_stale
from openhands_rl_plugin.training.loop.rollouts import (
    DifficultyPool,
    Group,
    GroupRunner,
    OutageTolerantServer,
    RolloutBuffer,
)
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


class Simulation:
    """Groups that take as many turns of the event loop as set, and a trainer that takes batches."""

    def __init__(self, durations: list[int], batch: int, staleness: int, batches: int) -> None:
        self.durations, self.batch, self.staleness, self.batches = durations, batch, staleness, batches
        self.version = 0
        self.begun: dict[int, int] = {}
        self.ages: list[int] = []
        self.used: list[int] = []

    async def play(self, number: int) -> Group:
        self.begun[number] = self.version
        for _ in range(self.durations[number % len(self.durations)]):
            await asyncio.sleep(0)
        return Group(number, ())

    def limit(self) -> int:
        return min(self.staleness + 1, self.batches - self.version) * self.batch

    async def run(self) -> None:
        buffer = RolloutBuffer(self.play, used=(), held=0, limit=self.limit())
        async with asyncio.TaskGroup() as tasks:
            buffer.start(tasks)
            while self.version < self.batches:
                taken = 0
                while taken < self.batch:
                    group = await buffer.take()
                    self.used.append(group.number)
                    if (age := self.version - self.begun[group.number]) > self.staleness:
                        buffer.close(1)
                        continue
                    self.ages.append(age)
                    taken += 1
                await asyncio.sleep(0)
                self.version += 1
                buffer.close(self.batch, self.limit())
            buffer.stop()


@given(
    durations=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    batches=st.integers(1, 6),
)
def test_no_group_is_older_than_the_bound_or_used_twice(
    durations: list[int], batch: int, staleness: int, batches: int
) -> None:
    simulation = Simulation(durations, batch, staleness, batches)
    asyncio.run(asyncio.wait_for(simulation.run(), 20))
    assert len(simulation.ages) == batch * batches and max(simulation.ages) <= staleness
    assert len(set(simulation.used)) == len(simulation.used)
    # No more were begun than were needed and dropped.
    assert len(simulation.begun) == len(simulation.used)
    if len(set(durations)) == 1:
        assert len(simulation.used) == batch * batches, "where none overtakes another, none is dropped"


async def test_tasks_that_earlier_attempts_all_solved_or_failed_are_passed_over(tmp_path: Path) -> None:
    plan = make_plan("shop").model_copy(update={"training": TASKS[:4]})
    async with AsyncExitStack() as stack:
        storage = FileTrajectoryStorage(tmp_path)
        stack.push_async_callback(storage.close)
        for task, rewards in zip(TASKS, ([0.0] * 4, [0.0, 1.0] * 2, [1.0] * 4), strict=False):
            for at, reward in enumerate(rewards):
                own = {"task": task, "id": f"{task.id}-{at}", "policy": PolicyRef.from_served_name("m", "shop-v000001")}
                await storage.add(example_trajectory(0).model_copy(update=own))
                score = Score(trajectory_id=f"{task.id}-{at}", reward=reward, reward_version="r")
                await storage.add_scores([score])
        pool = DifficultyPool(plan.training, (0.1, 0.9), newest=4, enough=2)
        nobody: Any = None
        await GroupRunner(plan, nobody, storage, nobody, pool).look("r")
    names = [task.id for task in TASKS[:4]]
    assert [pool.draw().id for _ in range(4)] == [names[1], names[3]] * 2
    for at in range(4):
        pool.note(names[3], str(at), True)
    assert [pool.draw().id for _ in range(4)] == names, "one is left, and two are needed: all are drawn again"


def sampled(*versions: int | None) -> Trajectory:
    """An episode with a sampled node of every version."""
    nodes = [Node(parent=None, message=Message(role="user", content="?"))]
    for version in versions:
        policy = PolicyRef(base_model="m", adapter=None if version is None else "a", version=version)
        answer = Message(role="assistant", content="!")
        nodes.append(Node(parent=len(nodes) - 1, message=answer, sampled=True, policy=policy))
    return example_trajectory(0).model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1})


def test_staleness_is_counted_in_versions_that_were_gone_on_from() -> None:
    # Version 2 was published by a stage that was killed, and is nobody's ancestor.
    lineage = ("m", "a-v000001", "a-v000001", "a-v000003")
    assert not is_too_stale(sampled(1, 3), lineage, 1) and is_too_stale(sampled(1, 3), lineage, 0)
    assert not is_too_stale(sampled(None), lineage, 2) and is_too_stale(sampled(None), lineage, 1)
    assert is_too_stale(sampled(2), lineage, 9), "weights that are no part of the run are no sample of it"


async def test_a_server_that_is_away_is_waited_for_within_the_patience_and_one_that_refuses_is_not(
    tmp_path: Path,
) -> None:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"")
        config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(config))

    store = AdapterStore(tmp_path)
    adapter = store.create("shop", write, base_model="m")
    refusals = ["429 Too Many Requests", "502 Bad Gateway"]
    loaded, received = set[str](), list[str]()

    def answer(path: str, body: Any) -> bytes:
        if refusals:
            return respond("the model is being loaded", refusals.pop())
        if path == "/v1/load_lora_adapter":
            loaded.add(body["lora_name"])
        cards = [{"id": "m", "owned_by": "vllm"}, *({"id": name, "parent": "m"} for name in loaded)]
        return respond({"data": cards})

    async with raw_server(answer) as upstream, AdapterPublisher(upstream.url, store) as publisher:
        assert (await OutageTolerantServer(publisher, 30.0, received.append).publish(adapter)).adapter == adapter.name
        assert loaded == {adapter.name} and "502" in received[0] and "429" in received[1] and received[2:] == [""]
        refusals[:] = ["503 Service Unavailable"] * 9
        with pytest.raises(InfrastructureError, match=r"was unavailable for 0 s .*HTTP 503"):
            await OutageTolerantServer(publisher, 0.0, received.append).publish(adapter)
        refusals[:] = ["500 Internal Server Error"] * 9
        with pytest.raises(PublishError, match="HTTP 500"):
            await OutageTolerantServer(publisher, 30.0, received.append).publish(adapter)
