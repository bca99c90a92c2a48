"""Values of the SDK, and of litellm behind it, to values of the project and back. Public names of the SDK only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from litellm.types.utils import Choices, Delta, ModelResponse, ModelResponseStream, StreamingChoices
from openhands.sdk.llm import LLM, ImageContent, LLMResponse, MessageToolCall, TextContent
from openhands.sdk.llm import Message as SdkMessage

from openhands_rl_plugin.core.messages import is_json_object, reasoning_in
from openhands_rl_plugin.core.tree import EpisodeTree
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

_numbers = itertools.count()


def sdk_message(message: Message) -> SdkMessage:
    """A message as the SDK passes it to its LLM."""
    calls = [
        MessageToolCall(id=call.id, name=call.name, arguments=call.arguments, origin="completion")
        for call in message.tool_calls
    ]
    return SdkMessage(
        role=message.role,
        content=[TextContent(text=message.content)] if message.content else [],
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def message_of(said: SdkMessage) -> Message:
    """The SDK's message as one of the project."""
    text = "\n".join(part.text for part in said.content if isinstance(part, TextContent))
    return Message(
        role=said.role, content=text or None, tool_calls=_calls_of(said), tool_call_id=said.tool_call_id, name=said.name
    )


def trajectory_of(messages: Sequence[SdkMessage], stop: StopReason, evidence: JsonObject) -> Trajectory:
    """A conversation that was not recorded, as an episode of an unknown policy."""
    tree, policy = EpisodeTree(), PolicyRef(base_model="unknown")
    for message in map(message_of, messages):
        if message.role == "assistant":
            tree.commit(tree.propose(Completion(message=message, policy=policy)))
        else:
            tree.head = tree.append(message)
    asked = next((message.content for message in tree.messages() if message.role == "user"), None)
    task = Task(id="conversation", environment="workspace", instruction=asked or "")
    return tree.freeze(
        EpisodeRequest(task=task, run_id="conversation", group_id="conversation"),
        trajectory_id="conversation",
        strategy=StrategySpec(name="unknown"),
        policy=policy,
        stop=stop,
        times=Times(started=0.0, finished=0.0),
        evidence=evidence,
    )


class SampledCalls:
    """The tool calls of a conversation as they were sampled.

    The SDK repairs a call, writes its arguments anew and replays that: for the model another text than it sampled.
    Where the arguments are no JSON object, the SDK's form stays: servers refuse such a history.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, list[ToolCall | None]] = {}

    def add(self, message: Message) -> None:
        """Remember the calls of an answer that is executed."""
        for call in message.tool_calls:
            self._by_id.setdefault(call.id, []).append(call if is_json_object(call.arguments) else None)

    def copied(self) -> SampledCalls:
        """The same calls, for a conversation that goes on by itself."""
        twin = SampledCalls()
        twin._by_id = {id: list(calls) for id, calls in self._by_id.items()}
        return twin

    def put_back(self, messages: Sequence[SdkMessage]) -> list[SdkMessage]:
        """The messages with the calls as they were sampled. Servers may use an id again, so the newest comes first."""
        seen: dict[str, int] = {}
        restored = [self._restored(message, seen) for message in reversed(messages)]
        return restored[::-1]

    def _restored(self, message: SdkMessage, seen: dict[str, int]) -> SdkMessage:
        if message.role != "assistant" or not message.tool_calls:
            return message
        calls = [self._sampled(call, seen) for call in reversed(message.tool_calls)][::-1]
        if calls == message.tool_calls:
            return message
        return message.model_copy(update={"tool_calls": calls})

    def _sampled(self, call: MessageToolCall, seen: dict[str, int]) -> MessageToolCall:
        known = self._by_id.get(call.id, ())
        at = seen[call.id] = seen.get(call.id, 0) + 1
        if at > len(known):
            return call
        if (own := known[-at]) is None:
            return call
        return call.model_copy(update={"name": own.name, "arguments": own.arguments})


def with_calls_of(messages: Sequence[Message], prompt: Sequence[SdkMessage]) -> list[Message]:
    """The messages of a tree, with their tool calls as ``prompt``, which is the same conversation, has them."""
    return [
        message if not message.tool_calls else message.model_copy(update={"tool_calls": _calls_of(sent)})
        for message, sent in zip(messages, prompt, strict=True)
    ]


def _calls_of(message: SdkMessage) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall.model_construct(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.tool_calls or ()
    )


def has_images(messages: Sequence[SdkMessage]) -> bool:
    """Whether any message shows an image, which only the SDK's own LLM can send."""
    return any(isinstance(part, ImageContent) for message in messages for part in message.content)


def response_of(completion: Completion, llm: LLM) -> LLMResponse:
    """A completion of an ``LLMEngine`` as the SDK's LLM would return it, counted in the metrics of ``llm``."""
    said, usage = completion.message, completion.usage
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.tool_calls
    ]
    message = {"role": "assistant", "content": said.content, "tool_calls": calls or None}
    if thought := reasoning_in(completion.metadata):
        message["reasoning_content"] = thought
    raw = ModelResponse(
        id=f"rl-{time.time_ns():x}-{next(_numbers)}",
        model=completion.policy.served_name if completion.policy else llm.model,
        choices=[{"index": 0, "finish_reason": completion.finish_reason or "stop", "message": message}],
        usage={
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    )
    choice = raw.choices[0]
    assert isinstance(choice, Choices)
    show_tokens(raw, choice, completion.tokens)
    llm.metrics.add_token_usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=0,
        context_window=0,
        response_id=raw.id,
    )
    return LLMResponse(
        message=SdkMessage.from_llm_chat_message(choice.message), metrics=llm.metrics.get_snapshot(), raw_response=raw
    )


def show_tokens(raw: ModelResponse, choice: Choices, tokens: Tokens | None) -> None:
    """Put token ids where the SDK reads them for its ``TokenEvent``."""
    prompt, sampled = (tokens.prompt_ids, tokens.sampled_ids) if tokens is not None else ((), ())
    # Fields that litellm adds where a server sends them.
    answer: Any = raw
    chosen: Any = choice
    answer.prompt_token_ids = list(prompt)
    fields = getattr(choice, "provider_specific_fields", None) or {}
    chosen.provider_specific_fields = {**fields, "token_ids": list(sampled)}


def chunks_of(response: LLMResponse) -> list[ModelResponseStream]:
    """The answer as a stream would have brought it, in whole parts: reasoning, text with calls, the end.

    A streamed answer brings no prompt ids through litellm, so it is sampled whole and streamed afterwards.
    """
    raw = response.raw_response
    if not isinstance(raw, ModelResponse) or not isinstance(choice := raw.choices[0], Choices):
        return []
    calls = [
        {"index": at, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for at, call in enumerate(response.message.tool_calls or ())
    ]
    thought = response.message.reasoning_content
    deltas = [Delta(role="assistant", reasoning_content=thought)] if thought else []
    deltas.append(Delta(role="assistant", content=choice.message.content, tool_calls=calls or None))
    parts = [StreamingChoices(index=0, delta=delta) for delta in deltas]
    parts.append(StreamingChoices(index=0, delta=Delta(), finish_reason=choice.finish_reason))
    return [ModelResponseStream(id=raw.id, model=raw.model, choices=[each]) for each in parts]


def price_of(model: str) -> float | None:
    """The price of a token, in USD: 0 for a model that is not in litellm's list, else ``None``, which takes that one.

    Otherwise the SDK asks litellm for the price of each answer, and warns each time that there is none.
    """
    from litellm import model_cost

    if model in model_cost or model.partition("/")[2] in model_cost:
        return None
    return 0.0
