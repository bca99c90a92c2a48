"""A rollout worker elsewhere, without a cluster: its messages, its queue and store, and its lock."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin import FileTrajectoryStorage, cli
from openhands_rl_plugin.contrib.rollouts.owners import release_dead
from openhands_rl_plugin.contrib.rollouts.places import Place
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.remote.actor import RemoteService, RolloutActor
from openhands_rl_plugin.contrib.rollouts.remote.messages import (
    AgainCall,
    Begin,
    CallAnswer,
    ClaimCall,
    EnteredCall,
    FindCall,
    FinishCall,
    FoundEpisode,
    FromActor,
    OwnedCall,
    ScoresCall,
    ToActor,
    from_actor,
    to_actor,
)
from openhands_rl_plugin.contrib.rollouts.remote.relay import RemoteWorker
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.server import refuse_loopback
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.states import ClaimedSession, Result, RolloutState
from openhands_rl_plugin.contrib.rollouts.worker import Orders
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, TrajectoryFilter
from openhands_rl_plugin.core.types import Frozen, Score, Trajectory
from openhands_rl_plugin.hosts.pool.messages import Ready, Refused, Store, Stored, to_line
from openhands_rl_plugin.hosts.pool.ray_cluster import Actor
from openhands_rl_plugin.testing.checks import example_trajectory
from openhands_rl_plugin.testing.samples import one_of_each, sample_episode, steps_of

try:
    import ray
except ModuleNotFoundError:
    ray = None

NUMBERS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
SESSIONS = st.builds(ClaimedSession, sample=NUMBERS, attempt=NUMBERS)
EPISODES = st.sampled_from(list(one_of_each()))
SCORES = st.builds(
    Score,
    reward=st.none() | SECONDS,
    value=st.none() | SECONDS,
    weight=SECONDS,
    detail=st.dictionaries(st.text(), st.text() | SECONDS | st.none()),
)
PATHS = st.none() | st.sampled_from([Path("config.toml"), Path("/shared/ü/config.toml")])
SERVICES = st.builds(
    lambda **options: ServiceOptions(base_url="http://10.0.0.5:8000/v1", executor="ray", **options),
    model=st.text(min_size=1),
    config=PATHS,
    cache=PATHS,
    temperature=st.none() | st.floats(0, 10),
    prepared=st.integers(0, 256),
)
MESSAGES: dict[type[Frozen], st.SearchStrategy[Frozen]] = {
    Begin: st.builds(Begin, owner=st.text(), orders=st.builds(Orders, folder=st.just(Path("/s")), service=SERVICES)),
    CallAnswer: st.builds(
        CallAnswer,
        number=NUMBERS,
        session=st.none() | SESSIONS,
        found=st.lists(st.builds(FoundEpisode, trajectory=EPISODES, scores=st.lists(SCORES).map(tuple))).map(tuple),
    ),
    Stored: st.builds(Stored, number=NUMBERS, dropped=NUMBERS),
    Ready: st.builds(Ready),
    Refused: st.builds(Refused, number=st.none() | NUMBERS),
    Store: st.builds(
        Store,
        number=NUMBERS,
        drop=st.lists(st.text()).map(tuple),
        start=st.none() | EPISODES.map(lambda episode: steps_of(episode)[0]),
        growth=st.none() | EPISODES.map(lambda episode: steps_of(episode)[1]),
        end=st.none() | EPISODES.map(EpisodeEnd.of),
        trajectory=st.none() | EPISODES,
    ),
    ClaimCall: st.builds(ClaimCall, number=NUMBERS),
    OwnedCall: st.builds(OwnedCall, number=NUMBERS),
    EnteredCall: st.builds(EnteredCall, number=NUMBERS, session=SESSIONS),
    FinishCall: st.builds(
        FinishCall,
        number=NUMBERS,
        session=SESSIONS,
        result=st.builds(Result, seconds=st.none() | SECONDS, tokens=st.none() | NUMBERS),
    ),
    AgainCall: st.builds(AgainCall, number=NUMBERS, session=SESSIONS, delay=SECONDS),
    ScoresCall: st.builds(ScoresCall, number=NUMBERS, scores=st.lists(SCORES).map(tuple)),
    FindCall: st.builds(
        FindCall, number=NUMBERS, where=st.builds(TrajectoryFilter, ids=st.none() | st.lists(st.text()).map(tuple))
    ),
}


def kinds(union: object) -> set[type]:
    return {kind for each in get_args(union) for kind in (get_args(each) or (each,))}


def test_every_message_has_its_example():
    assert set(MESSAGES) == kinds(ToActor) | kinds(FromActor)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_arrives_as_it_was_sent(kind: type[Frozen]):
    read = to_actor if kind in kinds(ToActor) else from_actor

    @settings(max_examples=30, deadline=None)
    @given(MESSAGES[kind])
    def arrives(message: Frozen) -> None:
        line = to_line(message)
        assert line.count(b"\n") == 1 and read(line) == message

    arrives()


def test_half_a_message_is_no_message():
    for read, whole in ((to_actor, to_line(CallAnswer(number=1))), (from_actor, to_line(ClaimCall(number=1)))):
        for line in (whole[:-3], b"", b"{}\n", to_line(Refused(number=None, error="", message=""))[:-5]):
            with pytest.raises(InfrastructureError, match="not a message"):
                read(line)


class Line:
    """A ``WorkerChannel`` to an actor in this process."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._gone = asyncio.Event()

    async def send(self, line: bytes) -> None:
        if not self._gone.is_set():
            await self._actor.receive(line)

    async def receive(self) -> Sequence[bytes]:
        reading, gone = asyncio.create_task(self._actor.outbox()), asyncio.create_task(self._gone.wait())
        await asyncio.wait([reading, gone], return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        gone.cancel()
        return reading.result() if reading.done() and not self._gone.is_set() else ()

    async def exit_message(self) -> str:
        return "the line was cut"

    def kill(self) -> None:
        self._gone.set()

    async def close(self) -> None:
        await self._actor.close()
        self.kill()


class Asking(Actor):
    """Has the queue and the store of its service, and no worker."""

    def __init__(self) -> None:
        super().__init__()
        self.service = RemoteService(self.send)
        self.owner = ""

    async def receive(self, line: bytes) -> None:
        message = to_actor(line)
        if isinstance(message, Begin):
            self.owner = message.owner
            await self.send(Ready())
        else:
            self.service.answered(message)

    async def close(self) -> None:
        pass


@pytest.fixture
def queue(tmp_path: Path):
    queue = JobQueue(tmp_path)
    yield queue
    queue.close()


@pytest.fixture
async def storage(tmp_path: Path):
    async with FileTrajectoryStorage(tmp_path) as storage:
        yield storage


def orders(folder: Path, **more: object) -> Orders:
    given = {"base_url": "http://127.0.0.1:9/v1", "model": "base", "executor": "ray", **more}
    return Orders(folder=folder, service=ServiceOptions.model_validate(given))


def submit(queue: JobQueue, samples: int = 1) -> None:
    queue.submit(
        TaskRequest.model_validate({"task_id": "a", "num_samples": samples, "metadata": {"task": "webshop-3"}})
    )


async def until_ready(worker: RemoteWorker) -> None:
    async with asyncio.timeout(5):
        while not worker.seconds:
            await asyncio.sleep(0)


async def test_the_queue_answers_over_the_line(tmp_path: Path, queue: JobQueue, storage: FileTrajectoryStorage):
    actor = Asking()
    worker = RemoteWorker(Line(actor), orders(tmp_path), queue, storage)
    await until_ready(worker)
    submit(queue, 2)
    far = actor.service.queue
    first, second = [await asyncio.to_thread(far.claim, "whoever") for _ in range(2)]
    assert first is not None and second is not None
    assert await asyncio.to_thread(far.claim, "whoever") is None
    assert queue.owners() == [actor.owner]
    assert await asyncio.to_thread(far.owned, "whoever") == {first.session_id, second.session_id}
    await asyncio.to_thread(far.entered, first, "whoever", RolloutState.RUNNING)
    done = Result(state=RolloutState.COMPLETED, body=json.dumps({"trajectory": {"traces": []}}), usable=True)
    assert await asyncio.to_thread(far.finish, first, "whoever", done) is True
    assert await asyncio.to_thread(far.finish, first, "whoever", done) is False
    await asyncio.to_thread(lambda: far.again(second, "whoever", delay=0, counts=True))
    assert await asyncio.to_thread(far.owned, "whoever") == set()
    again = queue.claim("other")
    assert again is not None and (again.session_id, again.attempt) == (second.session_id, 1)
    assert release_dead(queue, tmp_path) == 1  # what the other had: nobody of this name is alive
    await worker.stop()
    assert worker.ended == "the line was cut"


async def test_the_store_answers_over_the_line(tmp_path: Path, queue: JobQueue, storage: FileTrajectoryStorage):
    actor = Asking()
    worker = RemoteWorker(Line(actor), orders(tmp_path), queue, storage)
    await until_ready(worker)
    far, played, other = actor.service.storage, sample_episode("played"), example_trajectory()
    start, *growths, end = steps_of(played)
    assert isinstance(start, EpisodeStart) and isinstance(end, EpisodeEnd)
    await far.begin(start)
    assert await far.drop([start.id, "unknown"]) == 1
    await far.begin(start)
    for growth in growths:
        assert isinstance(growth, EpisodeGrowth)
        await far.grow(growth)
    await far.end(end)
    await far.add(other)
    score = Score(trajectory_id=other.id, reward=0.5, reward_version="r-1")
    await far.add_scores([score])
    wanted = TrajectoryFilter(ids=(played.id, other.id), finished=None)
    near = [found async for found in storage.find(wanted)]
    assert [found async for found in far.find(wanted)] == near
    assert near == [(played, ()), (other, (score,))]
    with pytest.raises(StorageError, match="single episodes"):
        await far.count()
    for reading in (far.find(), far.find(TrajectoryFilter(run_id="run")), far.summaries()):
        with pytest.raises(StorageError, match="single episodes"):
            await anext(reading)
    gap = EpisodeGrowth(trajectory_id="unknown", first=3, nodes=played.nodes[-1:])
    with pytest.raises(StorageError):
        await far.grow(gap)
    await worker.stop()


async def test_an_error_of_the_queue_is_the_workers(tmp_path: Path, storage: FileTrajectoryStorage):
    actor, queue = Asking(), JobQueue(tmp_path)
    worker = RemoteWorker(Line(actor), orders(tmp_path), queue, storage)
    await until_ready(worker)
    queue.close()
    with pytest.raises(StorageError, match=r"the queue .* cannot be used"):
        await asyncio.to_thread(actor.service.queue.claim, "")
    assert worker.ended is None
    await worker.stop()


async def test_answers_to_calls_that_were_cancelled_are_ignored():
    sent: list[Frozen] = []

    async def send(message: Frozen) -> None:
        sent.append(message)

    service = RemoteService(send)
    for call in (service.storage.add_scores([]), service.storage.drop(["a"])):
        calling = asyncio.create_task(call)
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    scores, drop = sent
    assert isinstance(scores, ScoresCall) and isinstance(drop, Store)
    service.answered(CallAnswer(number=scores.number, error="too late"))
    service.answered(Stored(number=drop.number, error="too late"))
    waiting = asyncio.create_task(service.storage.drop(["b"]))
    await asyncio.sleep(0)
    again = sent[-1]
    assert isinstance(again, Store) and again.number != drop.number
    service.answered(Stored(number=again.number, dropped=1))
    assert await waiting == 1


async def test_what_a_worker_sent_is_written_before_others_have_its_episodes(tmp_path: Path, queue: JobQueue):
    writing, may_end = asyncio.Event(), asyncio.Event()

    class Slow(FileTrajectoryStorage):
        async def add(self, trajectory: Trajectory) -> None:
            writing.set()
            await may_end.wait()
            await super().add(trajectory)

    async with Slow(tmp_path) as storage:
        actor = Asking()
        line = Line(actor)
        worker = RemoteWorker(line, orders(tmp_path), queue, storage)
        await until_ready(worker)
        submit(queue)
        await asyncio.to_thread(actor.service.queue.claim, "")
        adding = asyncio.create_task(actor.service.storage.add(example_trajectory()))
        await writing.wait()
        line.kill()
        for _ in range(20):
            assert release_dead(queue, tmp_path) == 0
            await asyncio.sleep(0.01)
        assert worker.ended is None
        may_end.set()
        async with asyncio.timeout(5):
            while worker.ended is None:
                await asyncio.sleep(0.01)
        assert release_dead(queue, tmp_path) == 1
        assert [found.id async for found, _ in storage.find()] == [example_trajectory().id]
        adding.cancel()


async def test_a_machine_without_the_key_is_named_before_anything_is_claimed(
    tmp_path: Path, queue: JobQueue, storage: FileTrajectoryStorage
):
    submit(queue)
    lacking = orders(tmp_path, api_key_env="NOT_ON_THIS_MACHINE")
    worker = RemoteWorker(Line(RolloutActor()), lacking, queue, storage)
    async with asyncio.timeout(5):
        while worker.ended is None:
            await asyncio.sleep(0.01)
    assert worker.ended.startswith(f"on {platform.node()}: ") and "NOT_ON_THIS_MACHINE is not set" in worker.ended
    assert worker.seconds == 0
    assert queue.owners() == []


async def test_a_place_waits_longer_for_who_never_works(caplog: pytest.LogCaptureFixture):
    starts = 0

    class Dead:
        ended, seconds = "dead on arrival", 0.0

        async def stop(self) -> None:
            raise AssertionError("it is gone")

    async def start() -> Dead:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise InfrastructureError("no Ray actor could be started: gone")
        return Dead()

    place = Place(start)
    loop = asyncio.get_running_loop()
    begun, at = loop.time(), list[float]()
    while starts < 3 and loop.time() - begun < 8:
        before = starts
        await place.keep()
        at += [loop.time() - begun] * (starts - before)
        await asyncio.sleep(0.05)
    await place.stop()
    assert len(at) == 3 and at[1] - at[0] > 0.9 and at[2] - at[1] > 2.9


@pytest.mark.parametrize("url", ["http://127.0.0.1:8100/v1", "http://localhost/v1", "http://[::1]:8/v1"])
def test_a_loopback_endpoint_is_for_one_machine(url: str):
    refuse_loopback(url, {"10.0.0.5"})
    refuse_loopback("http://10.0.0.9:8100/v1", {"10.0.0.5", "10.0.0.6"})
    with pytest.raises(ConfigError, match="each of the Ray cluster's 2 machines; give an address"):
        refuse_loopback(url, {"10.0.0.5", "10.0.0.6"})


def served(folder: Path, *words: str) -> list[str]:
    return ["rollouts", "serve", "--store", str(folder), "--model", "m", "--port", "0", "--executor", "ray", *words]


def test_a_balancer_is_not_for_other_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(served(tmp_path, "--base-urls", "http://10.0.0.5/v1,http://10.0.0.6/v1")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "give --base-url with one address that all machines reach" in line


@pytest.mark.skipif(ray is not None, reason="Ray is installed")
def test_without_ray_it_is_said_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(served(tmp_path, "--base-url", "http://10.0.0.5/v1")) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and "openhands_rl_plugin[ray]" in line and not printed.out
