"""Tools in the prompt of a model without tool calling, by the text of ``compact_prompt``.

OpenHands' own text takes 2,000 tokens, and goes with the tools of a call. So the call is made without tools: its
messages are converted here before, and the answer after, by OpenHands' own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litellm import Message as LiteLLMMessage
from litellm.types.utils import Choices, ModelResponse
from openhands.core.config import LLMConfig
from openhands.llm.fn_call_converter import (
    STOP_WORDS,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from openhands.llm.model_features import get_features

from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.hosts.compact_prompt import described


def described_tools(prompt: Sequence[WireMessage], tools: Sequence[Any]) -> list[Any]:
    """The prompt as it is sent. Raises OpenHands' ``FunctionCallConversionError``."""
    system = [message for message in prompt if message["role"] == "system"]
    rest: list[Any] = [message for message in prompt if message["role"] != "system"]
    # Without tools it adds no text to the conversation.
    converted = convert_fncall_messages_to_non_fncall_messages(rest, [], add_in_context_learning_example=False)
    return described([*system, *converted], tools)


def describe_in_prompt(arguments: dict[str, Any], config: LLMConfig) -> None:
    """Change the arguments of a completion to one without tools."""
    arguments["messages"] = described_tools(arguments["messages"], arguments.pop("tools"))
    if get_features(config.model).supports_stop_words and not config.disable_stop_word:
        arguments["stop"] = STOP_WORDS


def read_described_call(response: ModelResponse, tools: Sequence[Any]) -> None:
    """Put the call that the answer's text holds in its place. Raises OpenHands' errors of a call that is wrong."""
    choice = response.choices[0] if response.choices else None
    if isinstance(choice, Choices):
        [answer] = convert_non_fncall_messages_to_fncall_messages([choice.message.model_dump()], list(tools))
        choice.message = LiteLLMMessage(**answer)
