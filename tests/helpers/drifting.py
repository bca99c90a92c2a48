"""Episodes with a known cause of drift: the host's conversation is real, the server's template is made to misbehave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    JsonObject,
    Message,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.testing import encode

ASSISTANT, END = encode(Message(role="assistant"))
OTHER_END = END + 100
"""An end token that the template does not know."""


def text_of(message: Message) -> str:
    """The message as the byte tokenizer's template prints it, calls included."""
    calls = "".join(f"<call>{call.name} {call.arguments}</call>" for call in message.tool_calls)
    return (message.content or "") + calls


def rendered(message: Message) -> tuple[int, ...]:
    """Role, bytes, end."""
    return encode(message.model_copy(update={"content": text_of(message), "tool_calls": ()}))


def decode(ids: Sequence[int]) -> str:
    """The text of ids; special tokens in brackets."""
    return "".join(chr(each) if each < 256 else f"<{each}>" for each in ids)


@dataclass(frozen=True)
class Server:
    """How prompts are made and how answers end.

    ``history`` renders an earlier message (default: as it is), ``generation_prompt`` is what stands behind the role of
    the answer to come, and ``opening`` gives what precedes the n-th prompt.
    """

    history: Callable[[Message], tuple[int, ...]] = rendered
    generation_prompt: str = ""
    opening: Callable[[int], str] = lambda turn: ""
    end: tuple[int, ...] = (END,)

    def tokens(self, turn: int, messages: Sequence[Message], sampled: str) -> Tokens:
        """The ids of a call and its answer."""
        history = [each for message in messages for each in self.history(message)]
        prompt = (*self.opening(turn).encode(), *history, ASSISTANT, *self.generation_prompt.encode())
        answer = (*sampled.encode(), *self.end)
        return Tokens(prompt_ids=prompt, sampled_ids=answer, logprobs=(-0.5,) * len(answer))


@dataclass(frozen=True)
class Answer:
    """What the policy says, what of it is in the message (default: all), and how the host replays it."""

    sampled: str
    message: Message | None = None
    replay: Message | None = None
    metadata: JsonObject | None = None


def reply(text: str, arguments: str | None = None) -> Message:
    """An answer, with a call when there are arguments."""
    calls = () if arguments is None else (ToolCall(id="call-1", name="bash", arguments=arguments),)
    return Message(role="assistant", content=text, tool_calls=calls)


def condensed(messages: Sequence[Message]) -> list[Message]:
    """What a condenser leaves: the opening and a summary."""
    return [*messages[:2], Message(role="user", content="Summary: some things were done.")]


def play(
    server: Server,
    answers: Sequence[Answer],
    *,
    rewrite: Callable[[Sequence[Message]], list[Message]] | None = None,
    rewrite_at: int = -1,
) -> Trajectory:
    """An episode of one answer after the other; at turn ``rewrite_at`` the host rewrites its history."""
    tree = EpisodeTree()
    conversation = HostConversation(tree)
    host = [Message(role="system", content="You are at a shell."), Message(role="user", content="Make it so, please.")]
    for turn, answer in enumerate(answers):
        if rewrite is not None and turn == rewrite_at:
            host = rewrite(host)
        rewritten = conversation.follow([to_wire(message) for message in host])
        message = answer.message or reply(answer.sampled)
        metadata: JsonObject = {**(answer.metadata or {}), **({"history_rewritten": True} if rewritten else {})}
        tokens = server.tokens(turn, host, answer.sampled)
        completion = Completion(message=message, tokens=tokens, policy=PolicyRef(base_model="m"), metadata=metadata)
        conversation.acted(tree.propose(completion))
        host = [*host, answer.replay or message, _observed(message, turn)]
    conversation.follow([to_wire(message) for message in host])
    return tree.freeze(
        EpisodeRequest(task=Task(id="t", environment="shell"), run_id="run", group_id="group"),
        trajectory_id="drifting",
        strategy=StrategySpec(name="StandardReAct"),
        policy=PolicyRef(base_model="m"),
        stop=StopReason.TERMINATED,
        times=Times(started=0.0, finished=1.0),
    )


def _observed(message: Message, turn: int) -> Message:
    if message.tool_calls:
        return Message(role="tool", content=f"Result number {turn}.", tool_call_id="call-1")
    return Message(role="user", content=f"Result number {turn}.")


def without_thinking(message: Message) -> tuple[int, ...]:
    """A template that prints no reasoning in earlier turns."""
    content = (message.content or "").rpartition("</think>")[2]
    return rendered(message.model_copy(update={"content": content}))


def with_spaces_in_json(message: Message) -> tuple[int, ...]:
    """A template that serialises the arguments of calls anew."""
    calls = tuple(replace_arguments(call, call.arguments.replace(":", ": ")) for call in message.tool_calls)
    return rendered(message.model_copy(update={"tool_calls": calls}))


def trimmed(message: Message) -> tuple[int, ...]:
    """A template with ``content | trim``."""
    return rendered(message.model_copy(update={"content": (message.content or "").strip()}))


def replace_arguments(call: ToolCall, arguments: str) -> ToolCall:
    """The call with other arguments."""
    return call.model_copy(update={"arguments": arguments})
