"""The episode of one session: its tree follows the client's conversation, and each answer is stored.

What a client asks for beside its episode (a summary of the history, a title) is told from the turns of the episode. A
client does not say which is which. A request is aside when it opens a conversation of its own without any tools while
the session has some, or got some later. It is a condensation when a rewritten history quotes its answer, and nothing
went on from it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import WireMessage, says, text_of, to_message, to_wire
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import MISSING, EpisodeEnd, EpisodeStart, TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.core.types import (
    CONDENSATION,
    KIND,
    SIDE,
    TURN,
    Completion,
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
from openhands_rl_plugin.rollout.journal import EpisodeJournal
from openhands_rl_plugin.session.conversation import ClientConversation, squeezed
from openhands_rl_plugin.session.requests import ClientRequest, with_sampled_calls
from openhands_rl_plugin.session.responses import RecordedChoice, UpstreamResponse
from openhands_rl_plugin.session.sampled_texts import SampledCalls, SampledTexts
from openhands_rl_plugin.session.token_id_text import NodeTokens, canonical

TOOLS = "tools"
"""The key of a sampled node's metadata with the tools of its request, where they are not those of the session."""
_SHORTEST_QUOTE = 8
"""Characters without white space; a shorter answer is in many texts by chance."""


class SideRequests:
    """The requests of one session that are no turns of its episode."""

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree
        self.found_later = False
        """Whether the kind of nodes, or the session's tools, became known after they were stored."""

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
            roots = tree.children(None)
            self._had_none(
                len(tree.nodes), {at for at in roots if messages and says(messages[0], tree.nodes[at].message)}
            )

    def remember_tools(self) -> None:
        """The same of a stored episode, in which the first request with tools has them noted."""
        tree = self._tree
        for at, node in enumerate(tree.nodes):
            if not tree.tools and isinstance(tools := node.metadata.get(TOOLS), list) and tools:
                tree.tools = tuple(tool for tool in tools if isinstance(tool, dict))
                self._had_none(at, {path_to(tree.nodes, at)[0]})

    def _had_none(self, stop: int, begun: set[int]) -> None:
        """The nodes before ``stop`` were asked for without tools; the session goes on from the roots ``begun``."""
        tree = self._tree
        for at, node in enumerate(tree.nodes[:stop]):
            self.found_later = True
            if node.sampled:
                node.metadata[TOOLS] = []
            if node.parent is None and at not in begun and kind_of(node) == TURN and self._is_alone(at):
                self._mark(at, SIDE)
        if tree.head is not None and kind_of(tree.nodes[tree.head]) == SIDE:
            tree.head = None

    def notice(self, first: int) -> None:
        """Look for quotes of side requests in the prompt up to the head; its nodes from ``first`` on are new."""
        tree = self._tree
        new = [at for at in tree.path() if at >= first and not tree.nodes[at].sampled]
        if not new or tree.nodes[new[0]].parent is None:
            return
        asked = [tree.nodes[at].message for at in new]
        told = squeezed(" ".join(message.content or "" for message in asked if message.role != "assistant"))
        root = tree.path()[0]
        for at, node in enumerate(tree.nodes[:first]):
            if not node.sampled or kind_of(node) == CONDENSATION or node.message.tool_calls:
                continue
            path = path_to(tree.nodes, at)
            if path[0] == root or not self._is_alone(path[0]):
                continue
            if len(said := squeezed(node.message.content)) >= _SHORTEST_QUOTE and said in told:
                self._mark(path[0], CONDENSATION)
                self.found_later = True

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
_USUAL = "chat/completions"
STRATEGY = StrategySpec(name="gateway")


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Identifies an episode. A session name that is used again after its end starts the next ``part``."""

    run_id: str
    name: str
    part: int = 0

    def request(self, instruction: str = "") -> EpisodeRequest:
        """The episode request of this key; equal keys give equal trajectory ids."""
        task = Task(id=self.name, environment=ENVIRONMENT, instruction=instruction)
        return EpisodeRequest(task=task, run_id=self.run_id, group_id=self.name, sample=self.part)

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.request())


class SessionEpisode:
    """Records responses. ``base_model`` is the model below versioned adapter names."""

    def __init__(self, storage: TrajectoryStorage, key: SessionKey, base_model: str) -> None:
        self._storage = storage
        self._key = key
        self._base_model = base_model
        self._journal: EpisodeJournal | None = None
        self._take(EpisodeTree(clock=time.time))

    @classmethod
    def continued(
        cls, storage: TrajectoryStorage, key: SessionKey, base_model: str, stored: Trajectory
    ) -> SessionEpisode:
        """Continue a stored episode."""
        episode = cls(storage, key, base_model)
        episode._journal = EpisodeJournal.resumed(storage, stored)
        episode._take(EpisodeTree.thaw(stored, clock=time.time))
        episode._sides.remember_tools()
        return episode

    @property
    def nodes(self) -> int:
        """How many messages the episode has."""
        return len(self._tree.nodes)

    @property
    def policy(self) -> PolicyRef | None:
        """The weights that gave the first answer; what was asked beside the episode may be of others."""
        known = [node for node in self._tree.nodes if node.policy is not None]
        return next((node.policy for node in known if kind_of(node) == TURN), known[0].policy if known else None)

    def with_sampled_calls(self, call: ClientRequest) -> tuple[ClientRequest, int]:
        """The request with the session's tool calls as they were sampled, and how many that changes."""
        return with_sampled_calls(call, self._calls)

    async def record(
        self,
        call: ClientRequest,
        answer: UpstreamResponse,
        latency: float,
        *,
        protocol: str,
        why_missing: Mapping[str, str],
    ) -> list[str]:
        """Store a response with the new messages of its prompt. After a ``StorageError``, the next call stores it, too.

        ``latency`` is in seconds. ``why_missing``: why there are no ``token_ids`` or ``logprobs``, if there are none;
        returns the cause for each answer to which that applies.
        """
        journal = self._journal or self._begin(call, answer)
        tree, first = self._tree, len(self._tree.nodes)
        messages, unknown = self._messages(call)
        tools = tree.tools
        self._sides.offer_tools(call, messages)
        aside = self._sides.begins(call)
        if aside:
            rewritten, parent = False, tree.beside([to_message(message) for message in messages], SIDE)
        else:
            rewritten = self._conversation.follow(messages)
            parent = tree.head
            self._sides.notice(first)
        metadata = _metadata(call, answer, latency, rewritten=rewritten, tools=tools)
        if protocol != _USUAL:
            metadata["protocol"] = protocol
        if call.instructions:
            metadata["instructions"] = True
        if unknown:
            metadata["unknown_before"] = unknown
        nodes = [
            self._propose(parent, choice, metadata, answer, usage=answer.usage() if at == 0 else Usage(), call=call)
            for at, choice in enumerate(answer.choices)
        ]
        causes = [cause for node in nodes if (cause := _note_missing(tree.nodes[node], why_missing))]
        for node in reversed(nodes):
            if aside:
                tree.nodes[node].metadata[KIND] = SIDE
            else:
                # Until the next request shows which choice the client uses, it is the first.
                self._conversation.acted(node)
                self._calls.add(tree.nodes[node].message)
        await journal.keep(tree)
        self._node_tokens.forget(range(first, len(tree.nodes)))
        return causes

    async def end(self, stop: StopReason, *, finished: float, evidence: JsonObject) -> str | None:
        """Close the episode and return its id, or ``None`` when nothing was recorded. Raises ``StorageError``."""
        if self._journal is None:
            return None
        end = EpisodeEnd(
            trajectory_id=self._journal.start.id,
            head=self._tree.head,
            stop=stop,
            policy=self.policy or self._journal.start.policy,
            tools=self._tree.tools,
            evidence=evidence,
            usage=self._tree.usage,
            finished=finished,
        )
        await self._journal.keep(self._tree)
        if self._sides.found_later or any(
            {"replayed_as", "malformed"} & node.metadata.keys() for node in self._tree.nodes
        ):
            await self._rewrite(end)
        else:
            await self._storage.end(end)
        return end.trajectory_id

    def _messages(self, call: ClientRequest) -> tuple[Sequence[WireMessage], str]:
        """All messages of a prompt, also those that the server holds, and why some are not known."""
        if not call.continues:
            return call.messages, call.unknown_before
        before = next((at for at, node in enumerate(self._tree.nodes) if _response_id(node) == call.continues), None)
        if before is None:
            return call.messages, f"the earlier response {call.continues:.100} was not recorded in this session"
        path = [to_wire(self._tree.nodes[at].message) for at in self._tree.path(before)]
        # Instructions hold for one request; each brings its own.
        past = path[1:] if self._tree.nodes[before].metadata.get("instructions") else path
        own = 1 if call.instructions else 0
        return [*call.messages[:own], *past, *call.messages[own:]], call.unknown_before

    def _take(self, tree: EpisodeTree) -> None:
        self._tree = tree
        self._node_tokens = NodeTokens(tree)
        self._node_tokens.forget(range(len(tree.nodes)))
        self._conversation = ClientConversation(tree, SampledTexts())
        self._sides = SideRequests(tree)
        self._calls = SampledCalls()
        for node in tree.nodes:
            if node.sampled:
                self._calls.add(node.message)

    def _begin(self, call: ClientRequest, answer: UpstreamResponse) -> EpisodeJournal:
        instruction = next((text_of(each.get("content")) for each in call.messages if each["role"] == "user"), None)
        request = self._key.request(instruction or "")
        self._tree.tools = call.tools
        policy = self._policy_of(answer, call)
        start = EpisodeStart.for_request(
            request, strategy=STRATEGY, policy=policy, tools=call.tools, started=time.time()
        )
        self._journal = EpisodeJournal(self._storage, start)
        return self._journal

    def _propose(
        self,
        parent: int | None,
        choice: RecordedChoice,
        metadata: JsonObject,
        answer: UpstreamResponse,
        *,
        usage: Usage,
        call: ClientRequest,
    ) -> int:
        tokens = None
        if choice.prompt is not None:
            tokens = self._node_tokens.read(parent, canonical(choice.prompt), choice.sampled, choice.logprobs)
        return self._tree.propose(
            Completion(
                message=choice.message,
                tokens=tokens,
                finish_reason=choice.finish_reason,
                usage=usage,
                policy=self._policy_of(answer, call),
                sampling=call.sampling() or SamplingParams(),
                metadata={**metadata, **({"message": choice.extra} if choice.extra else {})},
            ),
            parent=parent,
        )

    def _policy_of(self, answer: UpstreamResponse, call: ClientRequest) -> PolicyRef:
        served = answer.model or call.model
        policy = PolicyRef.from_served_name(self._base_model, served)
        return policy if policy.adapter is not None else PolicyRef(base_model=served)

    async def _rewrite(self, end: EpisodeEnd) -> None:
        """Replace the whole stored episode: appending cannot add ``replayed_as`` or a kind to nodes that are stored."""
        turns = [node for node in self._tree.nodes if kind_of(node) == TURN]
        asked = next((node.message.content for node in turns if node.message.role == "user"), None)
        for node in turns:
            if node.metadata.get(TOOLS) == list(self._tree.tools):
                del node.metadata[TOOLS]  # noted when they were not known to be those of the session
        async for stored, _ in self._storage.find(TrajectoryFilter(ids=(end.trajectory_id,), finished=None)):
            nodes = tuple(
                node.model_copy(update={"metadata": own.metadata})
                for node, own in zip(stored.nodes, self._tree.nodes, strict=True)
            )
            times = Times(started=stored.times.started, finished=end.finished)
            kept = {name: value for name, value in end if name not in ("trajectory_id", "finished")}
            task = stored.task.model_copy(update={"instruction": asked or stored.task.instruction})
            await self._storage.add(stored.model_copy(update={**kept, "nodes": nodes, "times": times, "task": task}))


def _note_missing(node: DraftNode, why: Mapping[str, str]) -> str:
    """Note on the node what training needs and it lacks; returns the cause, empty when it has all."""
    if node.tokens is None:
        what = "token_ids"
    elif node.tokens.sampled_ids and not node.tokens.logprobs:
        what = "logprobs"
    else:
        return ""
    node.metadata[MISSING] = {what: why[what]}
    return f"{what}: {why[what]}"


def _response_id(node: DraftNode) -> JsonValue:
    response = node.metadata.get("response")
    return response.get("id") if isinstance(response, dict) else None


def _metadata(
    call: ClientRequest, answer: UpstreamResponse, latency: float, *, rewritten: bool, tools: tuple[JsonObject, ...]
) -> JsonObject:
    metadata: JsonObject = {"request": call.parameters, "response": answer.about, "latency": round(latency, 4)}
    if call.streams:
        metadata["streamed"] = True
    if rewritten:
        metadata["history_rewritten"] = True
    if call.tools != tools:
        metadata[TOOLS] = list(call.tools)
    return metadata
