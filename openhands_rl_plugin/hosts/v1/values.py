"""Values of the SDK, and of litellm behind it, to values of the project and back. Public names of the SDK only."""

from __future__ import annotations

from collections.abc import Sequence

from litellm.types.utils import Choices, Delta, ModelResponse, ModelResponseStream, StreamingChoices
from openhands.sdk.llm import ImageContent, TextContent
from openhands.sdk.llm import Message as SdkMessage

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
    ToolCall,
    Trajectory,
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


def _calls_of(message: SdkMessage) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall.model_construct(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.tool_calls or ()
    )


def has_images(messages: Sequence[SdkMessage]) -> bool:
    """Whether any message shows an image."""
    return any(isinstance(part, ImageContent) for message in messages for part in message.content)


def chunks_of(response: ModelResponse) -> list[ModelResponseStream]:
    """The answer as a stream would have brought it, in whole parts: reasoning, text with calls, the end.

    A streamed answer brings no prompt ids through litellm, so it is sampled whole and streamed afterwards.
    """
    if not response.choices or not isinstance(choice := response.choices[0], Choices):
        return []
    said = choice.message
    calls = [{"index": at, **call.model_dump()} for at, call in enumerate(said.tool_calls or ())]
    thought = getattr(said, "reasoning_content", None)
    deltas = [Delta(role="assistant", reasoning_content=thought)] if thought else []
    deltas.append(Delta(role="assistant", content=said.content, tool_calls=calls or None))
    parts = [StreamingChoices(index=0, delta=delta) for delta in deltas]
    parts.append(StreamingChoices(index=0, delta=Delta(), finish_reason=choice.finish_reason))
    return [ModelResponseStream(id=response.id, model=response.model, choices=[each]) for each in parts]


def price_of(model: str) -> float | None:
    """The price of a token, in USD: 0 for a model that is not in litellm's list, else ``None``, which takes that one.

    Otherwise the SDK asks litellm for the price of each answer, and warns each time that there is none.
    """
    from litellm import model_cost

    if model in model_cost or model.partition("/")[2] in model_cost:
        return None
    return 0.0
