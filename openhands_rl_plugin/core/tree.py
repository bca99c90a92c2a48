"""The mutable builder of one episode: observe, propose, commit, and in the end freeze.

It is the only mutable thing on a task's way from the environment to the store. Strategies add candidates to it, the
session (or a host) commits one of them and adds the environment's observation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, Self

from pydantic import ConfigDict

from openhands_rl_plugin.core.arrays import Ids
from openhands_rl_plugin.core.messages import WireMessage, equals, to_message, whole_observation
from openhands_rl_plugin.core.types import (
    AT,
    KIND,
    Completion,
    EpisodeRequest,
    Failure,
    JsonObject,
    Limits,
    Message,
    Node,
    Observation,
    PolicyRef,
    StopReason,
    StrategySpec,
    Times,
    Tokens,
    Trajectory,
    Usage,
    path_to,
)

CHARACTERS_PER_TOKEN = 4
"""The estimate for text that no tokenizer has read."""


class DraftNode(Node):
    """A node that search may still change (``value``, ``visits``, ``reward``, ``simulated``); it is checked when it is
    frozen. ``parent`` is an index into ``EpisodeTree.nodes``, ``None`` for the root."""

    model_config = ConfigDict(frozen=False)

    @property
    def executed(self) -> bool:
        """Whether the real environment answered this action; a simulation does not count."""
        return self.reward is not None and not self.simulated


class EpisodeTree:
    """The messages of one episode as nodes with integer parents; ``head`` is the current one.

    ``clock``: the Unix time in seconds, noted on each new node; recorders of what happens now give one.
    ``turns_left`` and ``longest_prompt`` (in tokens) bound how far the episode may continue from there (``None``: no
    bound), and strategies do not plan beyond. The runner of the episode sets them before each decision.
    """

    def __init__(self, *, tools: Sequence[JsonObject] = (), clock: Callable[[], float] | None = None) -> None:
        self.tools = tuple(tools)
        self._clock = clock
        self.nodes: list[DraftNode] = []
        self.head: int | None = None
        self.turns_left: int | None = None
        self.longest_prompt: int | None = None
        self.terminated = False
        self.truncated = False
        self.usage = Usage()
        self._children: dict[int | None, list[int]] = {}

    @classmethod
    def thaw(cls, trajectory: Trajectory, *, clock: Callable[[], float] | None = None) -> Self:
        """The tree that was frozen. An unfinished episode has no usage yet; then it is counted from the nodes."""
        tree = cls(tools=trajectory.tools)
        for node in trajectory.nodes:
            tree._add(**{**dict(node), "metadata": deepcopy(node.metadata)})
        tree._clock = clock
        tree.head = trajectory.head
        tree.terminated = trajectory.stop is StopReason.TERMINATED
        tree.truncated = trajectory.stop is StopReason.TRUNCATED
        unfinished = trajectory.stop is StopReason.UNFINISHED
        tree.usage = tree._counted() if unfinished else trajectory.usage
        return tree

    def observe(self, observation: Observation) -> None:
        """Add an observation below ``head``; its reward belongs to the action that caused it.

        If a simulation got the same observation, its nodes become the real ones and keep their statistics.
        """
        if self.head is not None and self.nodes[self.head].sampled:
            action = self.nodes[self.head]
            action.reward = (0.0 if action.simulated else action.reward or 0.0) + observation.reward
            action.simulated = False
            self.usage += Usage(steps=1)
        for message in observation.messages:
            same = (at for at in self.children(self.head) if self.nodes[at].message == message)
            known = next((at for at in same if not self.nodes[at].sampled), None)
            self.head = self.append(message) if known is None else known
        self.terminated |= observation.terminated
        self.truncated |= observation.truncated

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last action, after its observation; one that was interrupted counts as executed then."""
        acted = next(self.nodes[index] for index in reversed(self.path()) if self.nodes[index].sampled)
        acted.reward = (acted.reward or 0.0) + reward

    def append(self, message: Message, *, parent: int | None = None) -> int:
        """Add a message that was not sampled below ``parent`` (default ``head``); does not move ``head``."""
        return self._add(parent=self.head if parent is None else parent, message=message)

    def propose(self, completion: Completion, *, parent: int | None = None) -> int:
        """Add a sampled candidate below ``parent`` (default ``head``); only the new prompt tokens are kept."""
        at = self.head if parent is None else parent
        self.usage += completion.usage
        return self._add(
            parent=at,
            message=completion.message,
            sampled=True,
            tokens=self._delta(at, completion.tokens),
            policy=completion.policy,
            sampling=completion.sampling,
            finish_reason=completion.finish_reason,
            metadata=dict(completion.metadata),  # search writes into it, and an engine may give it twice
        )

    def add_side_completion(self, prompt: Sequence[Message], completion: Completion, kind: str) -> int:
        """Add the completion of a side request, such as a summary: a path of nodes of this ``kind`` from a new root.

        The head does not move. Returns the index of the completion's node.
        """
        kept = completion.model_copy(update={"metadata": {**completion.metadata, KIND: kind}})
        return self.propose(kept, parent=self.add_side_prompt(prompt, kind))

    def add_side_prompt(self, prompt: Sequence[Message], kind: str) -> int:
        """Add the prompt of a side request. Returns its last node's index; raises ``ValueError`` if it is empty."""
        at: int | None = None
        for message in prompt:
            at = self._add(parent=at, message=message, metadata={KIND: kind})
        if at is None:
            raise ValueError("a prompt needs a message")
        return at

    def commit(self, index: int) -> None:
        """Make a proposed node the next action."""
        if not self.nodes[index].sampled:
            raise ValueError(f"node {index} was not sampled, so it cannot be an action")
        self.head = index

    @property
    def action(self) -> Message:
        """The committed answer that is to be executed."""
        if self.head is None or not self.nodes[self.head].sampled:
            raise ValueError("no action is committed")
        return self.nodes[self.head].message

    def path(self, leaf: int | None = None) -> list[int]:
        """Node indices from the root to ``leaf`` (default: ``head``)."""
        return [*path_to(self.nodes, self.head if leaf is None else leaf)]

    def messages(self, leaf: int | None = None) -> tuple[Message, ...]:
        """The conversation that a model answers at ``leaf`` (default: ``head``)."""
        return tuple(self.nodes[index].message for index in self.path(leaf))

    def children(self, node: int | None) -> tuple[int, ...]:
        """Indices of the nodes directly below ``node``, in the order in which they were added."""
        return tuple(self._children.get(node, ()))

    @property
    def turns(self) -> int:
        """Number of sampled nodes on the acted path. Malformed answers count: a step is a step."""
        return sum(self.nodes[index].sampled for index in self.path())

    def context_ids(self, node: int | None) -> Ids:
        """All token ids from the start of the segment to the end of the last sampled node at or above ``node``."""
        parts: list[bytes] = []
        while node is not None:
            if (tokens := self.nodes[node].tokens) is not None:
                parts += bytes(tokens.sampled_ids), bytes(tokens.prompt_ids)
                if not tokens.extends:
                    break
            node = self.nodes[node].parent
        return Ids(b"".join(reversed(parts)))

    def prompt_length(self, leaf: int | None = None) -> int:
        """Tokens of the prompt for an answer at ``leaf`` (default: ``head``): the recorded ids where there are any,
        plus an estimate for the text after them."""
        at, characters = self.head if leaf is None else leaf, 0
        known = len(self.context_ids(at))
        while at is not None and self.nodes[at].tokens is None:
            characters += len(self.nodes[at].message.content or "")
            at = self.nodes[at].parent
        return known + characters // CHARACTERS_PER_TOKEN

    def freeze(
        self,
        request: EpisodeRequest,
        *,
        trajectory_id: str,
        strategy: StrategySpec,
        policy: PolicyRef,
        stop: StopReason,
        times: Times,
        evidence: JsonObject | None = None,
        failure: Failure | None = None,
    ) -> Trajectory:
        """The finished episode as one immutable value."""
        nodes = tuple(Node(**vars(node)) for node in self.nodes)
        return Trajectory(
            id=trajectory_id,
            run_id=request.run_id,
            group_id=request.group_id,
            task=request.task,
            strategy=strategy,
            policy=next((node.policy for node in nodes if node.policy is not None), policy),
            nodes=nodes,
            head=self.head,
            stop=stop,
            tools=self.tools,
            evidence=evidence or {},
            failure=failure,
            usage=self.usage,
            times=times,
        )

    def _add(self, **fields: Any) -> int:
        node = DraftNode.model_construct(**fields)
        if self._clock is not None:
            node.metadata.setdefault(AT, self._clock())
        self.nodes.append(node)
        index = len(self.nodes) - 1
        self._children.setdefault(node.parent, []).append(index)
        return index

    def _counted(self) -> Usage:
        """The tokens and calls of the nodes: each answer is one call with its whole prompt. Of the rest nothing is
        known: neither cached tokens nor calls whose answers are no part of the tree."""
        usage = Usage()
        for at, node in enumerate(self.nodes):
            if node.sampled:
                sampled = len(node.tokens.sampled_ids) if node.tokens else 0
                whole = len(self.context_ids(at)) if node.tokens else 0
                steps = int(node.executed)
                usage += Usage(prompt_tokens=whole - sampled, completion_tokens=sampled, calls=1, steps=steps)
        return usage

    def _delta(self, parent: int | None, tokens: Tokens | None) -> Tokens | None:
        if tokens is None or tokens.extends:
            return tokens
        context = self.context_ids(parent)
        if not context or tokens.prompt_ids[: len(context)] != context:
            return tokens
        delta = tokens.prompt_ids[len(context) :]
        return tokens.model_copy(update={"extends": True, "prompt_ids": delta})


REPLAYED_AS = "replayed_as"
"""Key of an answer's metadata: the form in which the host repeats it, where that is another one."""


class HostConversation:
    """The path of ``tree`` that the host's next prompt consists of.

    An assistant message is matched with the answers to the same prompt that were acted on: first with an equal one,
    then with one that the host repeats in another form. Other messages are matched with equal ones, so nodes of a
    simulation become the real ones. ``strict``: a text that cannot be another form of the answer is the host's own.
    ``unseen``: what is sent in the place of a host's form, which is then not noted.
    """

    def __init__(
        self,
        tree: EpisodeTree,
        *,
        strict: bool = False,
        unseen: Callable[[WireMessage, Message], object | None] = lambda form, answer: None,
    ) -> None:
        self._tree, self._strict, self._unseen = tree, strict, unseen
        # The host's form of a node; absent for an answer that was not replayed yet, or that the host never replays.
        self._forms: dict[int, Message] = {}
        self._acted = {at for at, node in enumerate(tree.nodes) if node.sampled}

    def acted(self, node: int) -> None:
        """Commit ``node``: the host executes it, and will replay it in its own form from now on."""
        self._tree.commit(node)
        self._acted.add(node)

    def leave_out(self, node: int) -> None:
        """Take the completion ``node`` off the path: the host could not parse it, and its next prompt omits it."""
        self._acted.discard(node)
        self._tree.head = self._tree.nodes[node].parent

    def follow(self, prompt: Sequence[WireMessage]) -> bool:
        """Make the path to the head equal to ``prompt``; true when the host rewrote earlier messages."""
        tree = self._tree
        at, known = self._match(prompt)
        new = tuple(to_message(message) for message in prompt[known:])
        before = tree.head
        self._settle(at, new)
        rewritten = at != (tree.head if new else before)
        # The last action was executed even if it is no part of the prompt any more, so it gets its step all the same.
        tree.observe(Observation())
        tree.head = at
        for message in new:
            tree.head = tree.append(message)
            self._forms[tree.head] = message
        return rewritten

    def common(self, prompt: Sequence[WireMessage]) -> tuple[tuple[Message, ...], int]:
        """The messages of the tree that the prompt begins with, and how many of its own those are."""
        at, known = self._match(prompt)
        return (() if at is None else self._tree.messages(at)), known

    def _settle(self, at: int | None, new: Sequence[Message]) -> None:
        """Note what was executed before the prompt, which has the path to ``at`` and then ``new``.

        An answer was not executed when another one to its prompt was sent back, nor when the host goes on from that
        prompt without it: what it has instead is why.
        """
        tree, nodes, last = self._tree, self._tree.nodes, self._tree.head
        path = tree.path(at) if at is not None else []
        if last is not None and last not in path and nodes[last].sampled:
            asked = nodes[last].parent
            left_out = at == asked and not (new and new[0].role == "assistant")
            if left_out and new:
                nodes[last].metadata.setdefault("malformed", new[0].content)
            if left_out or any(nodes[index].sampled and nodes[index].parent == asked for index in path):
                tree.head = asked
        for node in (nodes[index] for index in path if index != tree.head):
            if node.sampled and node.reward is None:
                node.reward = 0.0
                tree.usage += Usage(steps=1)

    def _match(self, prompt: Sequence[WireMessage]) -> tuple[int | None, int]:
        """The last node that the prompt has in common with the tree, and the number of messages up to it."""
        path, forms = self._tree.path(), self._forms
        at: int | None = None
        on_path = True
        for known, message in enumerate(prompt):
            if on_path and known < len(path) and (form := forms.get(path[known])) is not None and equals(message, form):
                at = path[known]
            elif (child := self._child(at, message)) is not None:
                at = child
                on_path = known < len(path) and path[known] == child
            else:
                return at, known
        return at, len(prompt)

    def _child(self, parent: int | None, message: WireMessage) -> int | None:
        children = self._tree.children(parent)[::-1]
        equal = (index for index in children if self._equals(index, message))
        return next(chain(equal, (index for index in children if self._replays(index, message))), None)

    def _equals(self, index: int, message: WireMessage) -> bool:
        node, form = self._tree.nodes[index], self._forms.get(index)
        if form is not None and equals(message, form):
            return True
        found = (index in self._acted or not node.sampled) and equals(message, node.message)
        if found:
            self._forms.setdefault(index, node.message)
        return found

    def _replays(self, index: int, message: WireMessage) -> bool:
        """Take the host's form of an answer it just executed; it may differ in white space and closing tags."""
        node = self._tree.nodes[index]
        if index not in self._acted or index in self._forms or message["role"] != "assistant":
            return False
        replay, answer = to_message(message), node.message
        sent, own = [[(call.id, call.name) for call in each.tool_calls] for each in (replay, answer)]
        if sent != own if own else self._strict and not _same_text(replay, answer):
            return False
        self._forms[index] = replay
        if self._unseen(message, answer) is None:
            node.metadata[REPLAYED_AS] = replay.model_dump(mode="json", exclude_defaults=True)
        return True


def _same_text(message: Message, answer: Message) -> bool:
    """Whether ``message`` can be ``answer`` truncated, without its reasoning, or with other white space."""
    one, other = squeezed(message.content), squeezed(answer.content)
    return one in other or other in one if one and other else one == other


def squeezed(text: str | None) -> str:
    """The text without white space."""
    return "".join((text or "").split())


def clip(observation: Observation, limits: Limits) -> Observation:
    """Cut every message to ``max_obs_length`` tokens, and note in the text how much was cut.

    An environment in this process may write halves of characters, too, which could not be stored.
    """
    observation = whole_observation(observation)
    if limits.max_obs_length is None:
        return observation
    longest, messages = limits.max_obs_length * CHARACTERS_PER_TOKEN, list[Message]()
    for message in observation.messages:
        content = message.content or ""
        if message.role != "system" and (cut := len(content) - longest) > 0:
            message = message.model_copy(update={"content": f"{content[:longest]}\n[{cut} characters cut]"})
        messages.append(message)
    return observation.model_copy(update={"messages": tuple(messages)})
