"""The session of a client over HTTP: its tree follows the client's conversation, and each answer is stored.

Without a strategy the model server's answer is passed on as it is, and recorded. A strategy compares what the model
proposes: nothing is forked. What the client executed, condensed or left out shows in its next prompt.

What a client asks for beside its episode (a summary of the history, a title) is told from the turns of the episode. A
client does not say which is which. A request is aside when it opens a conversation of its own without any tools while
the session has some, or got some later. It is a condensation when a rewritten history quotes its answer, and nothing
went on from it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import JsonValue

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.messages import WireMessage, says, text_of, to_message, to_wire
from openhands_rl_plugin.core.protocols import Strategy, TrajectoryStorage
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.core.types import (
    CONDENSATION,
    KIND,
    SIDE,
    TURN,
    EpisodeRequest,
    JsonObject,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
    Usage,
    kind_of,
    path_to,
)
from openhands_rl_plugin.models.engines.extensions import SAMPLING, TOKEN_IDS, ExtensionAttempt, missing_parts
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.chat_completions import CHAT, added_fields
from openhands_rl_plugin.session.conversation import ClientConversation, squeezed
from openhands_rl_plugin.session.protocol import WireProtocol
from openhands_rl_plugin.session.replies import PendingCalls
from openhands_rl_plugin.session.requests import ClientRequest
from openhands_rl_plugin.session.responses import UpstreamResponse
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.session.storage import bound_to
from openhands_rl_plugin.session.token_id_text import Json
from openhands_rl_plugin.session.turns import EpisodeOver
from openhands_rl_plugin.session.upstream import Upstream

TOOLS = "tools"
"""The key of a sampled node's metadata with the tools of its request, where they are not those of the session."""
_SHORTEST_QUOTE = 8
"""Characters without white space; a shorter answer is in many texts by chance."""


class SideRequests:
    """The requests of one session that are no turns of its episode."""

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree

    def begins(self, call: ClientRequest) -> bool:
        """Whether the request is aside, before it is part of the tree."""
        nodes = self._tree.nodes
        if not self._tree.tools or call.tools or not call.messages or not any(node.sampled for node in nodes):
            return False
        if any(message["role"] == "assistant" for message in call.messages):
            return False
        roots = [nodes[at] for at in self._tree.children(None) if kind_of(nodes[at]) == TURN]
        return not any(says(call.messages[0], root.message) for root in roots)

    def offer_tools(self, call: ClientRequest, messages: Sequence[WireMessage]) -> None:
        """Take the tools of the first request that has some as those of the session. What was asked before it is aside
        when it is no beginning of this conversation and nothing went on from it."""
        tree = self._tree
        if not tree.tools and call.tools:
            tree.tools = call.tools
            begun = {at for at in tree.children(None) if messages and says(messages[0], tree.nodes[at].message)}
            self._had_none(len(tree.nodes), begun)

    def remember(self) -> None:
        """Tell the same of a stored episode. The first request with tools has them noted, and one that rewrote the
        history that it did."""
        tree = self._tree
        for at, node in enumerate(tree.nodes):
            if not tree.tools and isinstance(tools := node.metadata.get(TOOLS), list) and tools:
                tree.tools = tuple(tool for tool in tools if isinstance(tool, dict))
                self._had_none(at, {path_to(tree.nodes, at)[0]})
            if node.metadata.get("history_rewritten"):
                self.notice(path_to(tree.nodes, at))

    def _had_none(self, stop: int, begun: set[int]) -> None:
        """The nodes before ``stop`` were asked for without tools; the session goes on from the roots ``begun``."""
        tree = self._tree
        for at, node in enumerate(tree.nodes[:stop]):
            if node.sampled:
                node.metadata[TOOLS] = []
            if node.parent is None and at not in begun and kind_of(node) == TURN and self._is_alone(at):
                self._mark(at, SIDE)
        if tree.head is not None and kind_of(tree.nodes[tree.head]) == SIDE:
            tree.head = None

    def notice(self, path: Sequence[int]) -> None:
        """Look for quotes of side requests in what the prompt ``path`` added: its nodes after all earlier answers."""
        tree = self._tree
        first = next((at for at in range(max(path, default=0), 0, -1) if tree.nodes[at - 1].sampled), 0)
        new = [at for at in path if at >= first and not tree.nodes[at].sampled]
        if not new or tree.nodes[new[0]].parent is None:
            return
        asked = [tree.nodes[at].message for at in new]
        told = squeezed(" ".join(message.content or "" for message in asked if message.role != "assistant"))
        for at, node in enumerate(tree.nodes[:first]):
            if not node.sampled or kind_of(node) == CONDENSATION or node.message.tool_calls:
                continue
            root = path_to(tree.nodes, at)[0]
            if root == path[0] or not self._is_alone(root):
                continue
            if len(said := squeezed(node.message.content)) >= _SHORTEST_QUOTE and said in told:
                self._mark(root, CONDENSATION)

    def _is_alone(self, root: int) -> bool:
        """Whether nothing went on from the answers of the conversation that begins at ``root``."""
        return not any(self._tree.children(at) for at in self._below(root) if self._tree.nodes[at].sampled)

    def _mark(self, root: int, kind: str) -> None:
        for at in self._below(root):
            self._tree.nodes[at].metadata[KIND] = kind

    def _below(self, root: int) -> list[int]:
        found = [root]
        for at in found:
            found += self._tree.children(at)
        return found


ENVIRONMENT = "gateway"
RECORDED = StrategySpec(name="gateway")
"""That of a session without a strategy."""


def request_of(run_id: str, name: str, part: int = 0) -> EpisodeRequest:
    """The request of a session's episode. A name that is used again after its end starts the next ``part``."""
    return EpisodeRequest(task=Task(id=name, environment=ENVIRONMENT), run_id=run_id, group_id=name, sample=part)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A client's request on its way to the model server. ``started`` is a time of ``perf_counter``."""

    protocol: WireProtocol
    session: ClientSession
    call: ClientRequest
    attempt: ExtensionAttempt
    started: float

    @property
    def filled(self) -> JsonObject:
        """The sampling parameters that the client left open, as they were sent."""
        added = added_fields(self.call, self.attempt.fields) if SAMPLING in self.attempt.fields else {}
        return {name: value for name, value in added.items() if name in SamplingParams.model_fields}

    def why(self, name: str, *, lost_ids: bool) -> str:
        """Why the answer came without what the field ``name`` asks for."""
        if not self.protocol.reports_ids:
            return f"POST /v1/{self.protocol.path} reports none"
        if self.call.document.get(name) is not None and not self.call.wants(name):
            return f"the client turned {name} off"
        if lost_ids and name == TOKEN_IDS:
            return "the stream left some token ids out"
        return self.attempt.why_missing(name)


class ClientSession(Session):
    """A session, and the requests that are in flight for it.

    ``strategy`` with its ``strategy_spec`` decides; without one the answers are recorded. ``base_model`` is the model
    below versioned adapter names. ``restores``: sampled calls are put back into its prompts.

    ``last_used`` is a Unix time in seconds. ``unrecorded``: its requests for completions that could not be recorded,
    by path.
    """

    follows = ClientConversation

    def __init__(
        self,
        storage: TrajectoryStorage,
        request: EpisodeRequest,
        settings: RLSettings,
        base_model: str,
        *,
        restores: bool,
        strategy: Strategy | None = None,
        strategy_spec: StrategySpec = RECORDED,
    ) -> None:
        super().__init__(
            request,
            settings,
            strategy=strategy or StandardReActStrategy(),
            strategy_spec=strategy_spec,
            base_model=base_model,
            environment_mode=True,
        )
        self.is_searched = strategy is not None
        self.last_used = time.time()
        self.pending = PendingCalls()
        self.unrecorded: Counter[str] = Counter()
        self.calls = SampledCalls() if restores else None
        self._storage = storage
        self._sides = SideRequests(self.tree)

    @property
    def name(self) -> str:
        return self.request.task.id

    @property
    def is_held(self) -> bool:
        """Whether it has to stay in memory."""
        return self.pending.busy or self.is_searched

    def continue_after(self, stored: Trajectory) -> None:
        """Go on after what an earlier gateway stored, or this one before it forgot. Raises ``StorageError``."""
        self.request = self.request.model_copy(update={"task": stored.task})
        self.policy, self.strategy_spec = stored.policy, stored.strategy
        if not self.resume(stored, bound_to(self._storage, asyncio.get_running_loop())):
            raise StorageError(f"the stored episode {stored.id} is none of a gateway")
        self.last_used = stored.times.finished
        self.ids.forget(range(len(self.tree.nodes)))
        for node in self.tree.nodes:
            self._remember(node)
        self._sides = SideRequests(self.tree)
        self._sides.remember()

    def policy_of(self, served: str) -> PolicyRef:
        """As ``Session.policy_of``. A server's model may be another than ``base_model``."""
        policy = super().policy_of(served)
        return policy if policy.adapter is not None else PolicyRef(base_model=served)

    async def record(self, exchange: Exchange, answer: UpstreamResponse, *, lost_ids: bool) -> list[str]:
        """Store a response with the new messages of its prompt. After a ``StorageError``, the next call stores it, too.

        Returns the cause for each answer without token ids or logprobs. ``lost_ids`` as in ``AnswerStream``.
        """
        call, latency = exchange.call, round(time.perf_counter() - exchange.started, 4)
        served = answer.model or call.model
        self._begin(call, served)
        tree, first, tools = self.tree, len(self.tree.nodes), self.tree.tools
        messages, unknown = self._messages(call)
        self._sides.offer_tools(call, messages)
        if aside := self._sides.begins(call):
            rewritten, parent = False, tree.beside([to_message(message) for message in messages], SIDE)
        else:
            rewritten, parent = self._conversation.follow(messages), tree.head
            self._sides.notice(tree.path())
        notes: JsonObject = {"request": call.parameters, "response": answer.about, "latency": latency}
        noted: JsonObject = {
            "streamed": call.streams,
            "history_rewritten": rewritten,
            TOOLS: list(call.tools) if call.tools != tools else None,
            "protocol": exchange.protocol.path if exchange.protocol is not CHAT else None,
            "instructions": call.instructions,
            "unknown_before": unknown,
        }
        notes |= {name: value for name, value in noted.items() if value or value == []}
        causes, nodes = [], []
        for at, choice in enumerate(answer.choices):
            made = self.completion(
                choice,
                after=parent,
                served=served,
                usage=answer.usage() if at == 0 else Usage(),
                sampling=call.sampling(exchange.filled),
                metadata={**notes, **({"message": choice.extra} if choice.extra else {})},
            )
            if missing := missing_parts(partial(exchange.why, lost_ids=lost_ids), made.tokens):
                made.metadata[MISSING] = missing
                causes += [f"{what}: {why}" for what, why in missing.items()]
            nodes.append(tree.propose(made, parent=parent))
            if aside:
                tree.nodes[nodes[-1]].metadata[KIND] = SIDE
            self._remember(tree.nodes[nodes[-1]])
        for node in reversed(nodes if not aside else ()):
            # Until the next request shows which choice the client uses, it is the first.
            self._conversation.acted(node)
        own = range(first, len(tree.nodes))  # another request may add nodes meanwhile, which are not stored yet
        await self.keep_up()
        self.ids.forget(own)
        return causes

    async def decided(self, call: ClientRequest, model: str, upstream: Upstream) -> Json:
        """The answer of the strategy, which is stored. Raises as ``Session.complete``."""
        self._begin(call, model)
        self.connect(upstream)
        body = {**call.document, "messages": list(call.messages), "model": model}
        body.pop("n", None)
        try:
            return await self._in_background(self._answered(call, body, upstream))
        except EpisodeOver as over:
            self.stop = over.stop
            raise

    async def _answered(self, call: ClientRequest, body: Json, upstream: Upstream) -> Json:
        self._sides.offer_tools(call, call.messages)
        if self._sides.begins(call):
            return await self.aside(body, SIDE, upstream)
        document, tree = await self.complete(body), self.tree
        self._sides.notice(tree.path(tree.nodes[tree.path()[-1]].parent))
        return document

    async def close(self, stop: StopReason, evidence: JsonObject) -> str | None:
        """Close the episode and return its id, or ``None`` when nothing was recorded. Raises ``StorageError``."""
        nodes, journal = self.tree.nodes, self._journal
        if journal is None or not nodes:
            return None
        await self.keep_up()
        self.end_here(self.stop or stop)
        if self.unrecorded:
            evidence = {**evidence, "unrecorded": dict(self.unrecorded)}
        turns = [node for node in nodes if kind_of(node) == TURN]
        for node in turns:
            if node.metadata.get(TOOLS) == list(self.tree.tools):
                del node.metadata[TOOLS]  # noted when they were not known to be those of the session
        if self.strategy_spec == RECORDED:
            self._ask(next((node.message.content for node in turns if node.message.role == "user"), None))
        times = Times(started=self.started, finished=self.last_used)
        trajectory = self.freeze(evidence=evidence).model_copy(update={"policy": self._first_policy(), "times": times})
        if not self.is_searched and not journal.is_continued_by(trajectory):
            # It is stored anew, and the ids are in the store only.
            stored = await stored_episode(self._storage, trajectory.id)
            if stored is None or len(stored.nodes) != len(nodes):
                raise StorageError(f"the stored episode {trajectory.id} was removed or changed by another process")
            pairs = zip(trajectory.nodes, stored.nodes, strict=True)
            kept = tuple(node.model_copy(update={"tokens": own.tokens}) for node, own in pairs)
            trajectory = trajectory.model_copy(update={"nodes": kept})
        await self.end(trajectory)
        return trajectory.id

    def _begin(self, call: ClientRequest, served: str) -> None:
        if self._journal is not None:
            return
        if not self.request.task.instruction:
            self._ask(next((text_of(each.get("content")) for each in call.messages if each["role"] == "user"), None))
        self.tree.tools = call.tools
        self.policy = self.policy_of(served)
        self.started = time.time()
        self.keep_in(self._storage, asyncio.get_running_loop())

    def _ask(self, instruction: str | None) -> None:
        task = self.request.task.model_copy(update={"instruction": instruction or self.request.task.instruction})
        self.request = self.request.model_copy(update={"task": task})

    def _first_policy(self) -> PolicyRef:
        """The weights that gave the first answer; what was asked beside the episode may be of others."""
        known = sorted((node for node in self.tree.nodes if node.policy), key=lambda node: kind_of(node) != TURN)
        return (known[0].policy if known else None) or self.policy

    def _remember(self, node: DraftNode) -> None:
        if self.calls is not None and node.sampled:
            self.calls.add(node.message)

    def _messages(self, call: ClientRequest) -> tuple[Sequence[WireMessage], str]:
        """All messages of a prompt, also those that the server holds, and why some are not known."""
        if not call.continues:
            return call.messages, call.unknown_before
        before = next((at for at, node in enumerate(self.tree.nodes) if _response_id(node) == call.continues), None)
        if before is None:
            return call.messages, f"the earlier response {call.continues:.100} was not recorded in this session"
        path = [to_wire(message) for message in self.tree.messages(before)]
        # Instructions hold for one request; each brings its own.
        past = path[1:] if self.tree.nodes[before].metadata.get("instructions") else path
        own = 1 if call.instructions else 0
        return [*call.messages[:own], *past, *call.messages[own:]], call.unknown_before


def _response_id(node: DraftNode) -> JsonValue:
    response = node.metadata.get("response")
    return response.get("id") if isinstance(response, dict) else None
