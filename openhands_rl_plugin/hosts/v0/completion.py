"""The completions of an OpenHands ``LLM``, asked of a session by a direct call in the place of litellm's.

It takes the place of ``LLM._completion_unwrapped``, below retries, message formatting and the conversion of tools to a
prompt, and before the answer is parsed. An error of the model server is raised as litellm's exception, so that
OpenHands' own retries and messages work as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from litellm import Message as LiteLLMMessage
from litellm.types.utils import Choices, ModelResponse
from openhands.core import exceptions
from openhands.llm.fn_call_converter import (
    STOP_WORDS,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from openhands.llm.llm import LLM
from openhands.llm.model_features import get_features

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.hosts.compact_prompt import described
from openhands_rl_plugin.hosts.shared.litellm_calls import answered, malformed, upstream_of
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.session.upstream import Upstream

MALFORMED = malformed(exceptions)
"""What OpenHands raises for an answer of the model that it cannot parse."""

ANSWERED = MALFORMED[1:]
"""Errors of an answer that OpenHands' controller reports to the model; others end the session."""


def connect(session: Session, llm: LLM) -> None:
    """Let the session sample from the model of ``llm``."""
    session.connect(_upstream(llm))


def ask(llm: LLM, complete: Complete) -> None:
    """Let ``complete`` answer the requests of ``llm``."""
    holder: Any = llm
    given: dict[str, Any] = _send_of(llm).keywords

    def answer(**more: Any) -> ModelResponse:
        return answered(complete, {**given, **more})

    answer.send = _send_of(llm)  # type: ignore[attr-defined]
    holder._completion_unwrapped = answer


def ask_beside(llm: LLM, session: Session, kind: str) -> None:
    """Record what ``llm`` is asked beside the episode, such as a condenser's summaries, as nodes of this ``kind``."""
    upstream = _upstream(llm)
    ask(llm, lambda body: background().wait_for(session.aside(body, kind, upstream)))


def twin(llm: LLM) -> LLM:
    """An LLM with the same settings and metrics of its own, which does not try again."""
    config = llm.config.model_copy(update={"num_retries": 1, "log_completions": False})
    return LLM(config, service_id=llm.service_id)


def _send_of(llm: LLM) -> Any:
    """litellm's ``completion`` as OpenHands bound it."""
    holder: Any = llm._completion_unwrapped
    return getattr(holder, "send", holder)


def _upstream(llm: LLM) -> Upstream:
    send = _send_of(llm)
    return upstream_of(send.keywords, send)


def describe_tools(llm: LLM) -> None:
    """Let ``llm`` describe tools in the prompt by our own text, which is shorter than OpenHands'."""
    holder: Any = llm
    if not isinstance(llm.completion, partial):
        holder._completion = partial(_completed_by_text, llm, llm.completion)


def _completed_by_text(
    llm: LLM, complete: Callable[..., ModelResponse], *, messages: Any, tools: Sequence[Any], **more: Any
) -> ModelResponse:
    sent = described_tools(llm.format_messages_for_llm(messages), tools)
    if get_features(llm.config.model).supports_stop_words and not llm.config.disable_stop_word:
        more["stop"] = STOP_WORDS
    response = complete(messages=sent, **more)
    read_described_call(response, tools)
    return response


def described_tools(prompt: Sequence[WireMessage], tools: Sequence[Any]) -> list[Any]:
    """The prompt as it is sent. Raises OpenHands' ``FunctionCallConversionError``."""
    rest: list[Any] = [message for message in prompt if message["role"] != "system"]
    # Without tools it adds no text to the conversation.
    converted = convert_fncall_messages_to_non_fncall_messages(rest, [], add_in_context_learning_example=False)
    return described(prompt, converted, tools)


def read_described_call(response: ModelResponse, tools: Sequence[Any]) -> None:
    """Put the call that the answer's text holds in its place. Raises OpenHands' errors of a call that is wrong."""
    choice = response.choices[0] if response.choices else None
    if isinstance(choice, Choices):
        [answer] = convert_non_fncall_messages_to_fncall_messages([choice.message.model_dump()], list(tools))
        choice.message = LiteLLMMessage(**answer)
