"""A session over a real server: what it sends, records, stores and returns, and branches of a host's run."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from scripted_model import EMPTY, ScriptedModel, refusal, reply, serve

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import MAX_COMPLETIONS_IN_FLIGHT, background
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import EpisodeRequest, JsonObject, StrategySpec, Task
from openhands_rl_plugin.models.engines.client import HttpUpstream, server_error
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.session import BranchWorld, Complete, Session

ASK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def session_of(server: ScriptedModel, strategy: Any = None, **request: Any) -> Session:
    known = {"task": Task(id="t", environment="e"), "run_id": "r", "group_id": "g", "seed": 3}
    session = Session(
        EpisodeRequest(**{**known, **request}),
        RLSettings(),
        strategy=strategy or StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="base",
        environment_mode=True,
    )
    session.upstream = HttpUpstream(server.url, "sk-hidden", 20.0)
    return session


def ask(session: Session, model: str, messages: Any = ASK, **more: Any) -> Any:
    return background().wait_for(session.respond({"model": model, "messages": messages, **more}))


def test_failed_requests_come_again_with_the_same_seed(server: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.sleep", lambda seconds: real(0))
    server.script(
        "shaky", [EMPTY, *[refusal(503, "busy for sk-hidden" + 9000 * "x")] * 3, refusal(429, "wait"), reply("Done.")]
    )
    session, errors = session_of(server), []
    for _ in range(2):
        with pytest.raises(CaughtFailure) as caught:
            ask(session, "shaky")
        errors.append(getattr(server_error(caught.value), "status", 0))
    assert errors == [200, 503] and session.failure is not None
    ask(session, "shaky")
    assert session.failure is None and len({body["seed"] for body in server.requests["shaky"]}) == 1
    attempts = session.tree.nodes[-1].metadata["attempts"]
    assert isinstance(attempts, list) and len(attempts) == 6
    assert "busy for ***" in str(attempts) and "sk-hidden" not in f"{attempts}{errors}" and len(str(attempts)) < 12_000
    assert not any("failed_attempts" in node.metadata for node in session.tree.nodes)


real = asyncio.sleep


class Slow(StandardReActStrategy):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.begun, self.seconds = threading.Event(), seconds

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        self.begun.set()
        await real(self.seconds)
        return await super().decide(tree, engine, world)


@pytest.mark.parametrize(("at", "until", "ends"), [(6, 7, True), (8, 7, False), (6, None, True), (9, math.inf, True)])
def test_a_stop_ends_the_decision_that_it_concerns(server: ScriptedModel, at: int, until: Any, ends: bool) -> None:
    server.policies["slow"] = lambda body: reply("Decided.")
    session = session_of(server, strategy := Slow(60 if ends else 0.1))
    with ThreadPoolExecutor(1) as host:
        answer = host.submit(session.answer, {"model": "slow", "messages": ASK}, at)
        assert strategy.begun.wait(20)
        session.cancel(until)
        with pytest.raises(asyncio.CancelledError) if ends else nullcontext():
            answer.result()
    strategy.seconds = 0.0
    if until is not None:
        with pytest.raises(asyncio.CancelledError):
            session.answer({"model": "slow", "messages": ASK}, 7)
    if until != math.inf:
        assert session.answer({"model": "slow", "messages": ASK}, 10)


class Counting:
    """A host that counts the model's answers to it, and ends when it asks to."""

    def __init__(self, before: list[Any], *, odd: bool = False) -> None:
        self.before, self.odd, self.closed = before, odd, False
        self.workspace = self

    def run(self, complete: Complete) -> None:
        messages: list[Any] = [*(self.before[:1] if self.odd else self.before)]
        while True:
            answer = complete({"messages": messages})["choices"][0]["message"]
            if answer["content"] == "stop":
                return
            messages = [*messages, answer, {"role": "user", "content": f"{len(messages)}"}]
            self.before = messages

    def fork(self) -> Counting:
        return Counting(self.before, odd=self.odd)

    def changes(self) -> JsonObject:
        return {"messages": len(self.before)}

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        return asked.did(error="no workspace")

    def close(self) -> None:
        self.closed = True


class Forking(StandardReActStrategy):
    """Executes one answer in many forks at once, and two more in a fork of one."""

    many, seen = MAX_COMPLETIONS_IN_FLIGHT + 20, ()

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        assert world is not None
        node = tree.propose((await engine.complete(tree.messages()))[0])
        forks: Any = [await world.fork() for _ in range(self.many)]
        seen = await asyncio.gather(*(fork.step(tree.nodes[node].message) for fork in forks))
        again = await forks[0].fork()
        [answer] = await engine.complete([*tree.messages(node), *seen[0].messages])
        self.seen = (*seen, await again.step(answer.message))
        await asyncio.gather(*(fork.close() for fork in (*forks, again)))
        return node


def test_branches_show_what_comes_and_each_has_a_thread_of_its_own(server: ScriptedModel) -> None:
    server.policies["fork"] = lambda body: reply("stop" if len(body["messages"]) > 2 else "go")
    strategy, threads = Forking(), threading.active_count()
    session, live = session_of(server, strategy), Counting(ASK)
    session.world = lambda: BranchWorld(live, session)
    ask(session, "fork")
    assert {seen.messages[0].content for seen in strategy.seen[:-1]} == {"2"} and strategy.seen[-1].terminated
    assert not live.closed
    assert threading.active_count() <= threads + MAX_COMPLETIONS_IN_FLIGHT, "closing ends the host's run"
    live.odd, strategy.many, session = True, 1, session_of(server, strategy)
    session.world = lambda: BranchWorld(live, session)
    with pytest.raises(CaughtFailure, match="does not begin with the live session's prompt") as caught:
        ask(session, "fork")
    assert isinstance(caught.value.__cause__, BadEnvironmentError)
