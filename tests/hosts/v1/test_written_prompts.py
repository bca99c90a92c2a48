"""A prompt that is written in parts is the one that the SDK writes as a whole."""

from __future__ import annotations

import itertools

import pytest
from openhands.sdk.llm import LLM, ImageContent, TextContent
from openhands.sdk.llm import Message as SdkMessage
from pydantic import SecretStr

from openhands_rl_plugin.core.types import Message, ToolCall
from openhands_rl_plugin.hosts.v1.values import sdk_message
from openhands_rl_plugin.hosts.v1.written_prompts import PromptWriter, WrittenLLM

_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABpfZFQAAAAABJRU5ErkJggg=="
)


def llm_of(model: str = "openai/some", **more: bool) -> LLM:
    return LLM(model=model, base_url="http://127.0.0.1:9/v1", api_key=SecretStr("none"), usage_id="agent", **more)


def turn(number: int) -> list[SdkMessage]:
    call = ToolCall(id=f"call_{number}", name="terminal", arguments=f'{{"command": "echo {number}"}}')
    said = Message(role="assistant", content="so" if number % 2 else None, tool_calls=(call,))
    heard = Message(role="tool", content=f"{number}\n", tool_call_id=call.id, name="terminal")
    return [sdk_message(said), sdk_message(heard)]


def opening() -> list[SdkMessage]:
    return [sdk_message(Message(role="system", content="Be good.")), sdk_message(Message(role="user", content="Do."))]


def prompts() -> list[list[SdkMessage]]:
    """Of a conversation that grows, loses its middle, is seen again, and has an earlier message changed."""
    whole = [*opening(), *itertools.chain.from_iterable(turn(number) for number in range(5))]
    rewritten = [*whole[:2], *whole[6:]]
    changed = [whole[0], sdk_message(Message(role="user", content="Do not.")), *whole[2:]]
    picture = SdkMessage(role="user", content=[TextContent(text="see"), ImageContent(image_urls=[_PICTURE])])
    return [whole[:2], whole[:4], whole[:8], whole, rewritten, rewritten, changed, whole[:3], [*whole, picture], whole]


@pytest.mark.parametrize(
    "llm",
    [
        llm_of(),
        llm_of(force_string_serializer=True),
        llm_of(native_tool_calling=False),
        llm_of("anthropic/claude-sonnet-4-20250514"),
        llm_of("openai/gpt-4o"),
    ],
    ids=lambda llm: llm.model,
)
def test_a_prompt_written_in_parts_is_the_one_written_as_a_whole(llm: LLM) -> None:
    writer = PromptWriter()
    for prompt in prompts():
        expected = llm.format_messages_for_llm([each.model_copy(deep=True) for each in prompt])
        assert writer.write(llm, prompt) == expected


def test_a_changed_setting_writes_all_anew() -> None:
    llm, writer = llm_of(), PromptWriter()
    as_parts = writer.write(llm, prompts()[2])
    llm.force_string_serializer = True
    as_text = writer.write(llm, prompts()[3])
    assert as_text == llm.format_messages_for_llm(prompts()[3])
    assert as_text[:2] != as_parts[:2]


def test_what_the_sdk_writes_into_a_prompt_is_not_kept() -> None:
    llm, writer = llm_of(), PromptWriter()
    written = writer.write(llm, prompts()[3])
    asked = WrittenLLM.over(llm, written)
    sent = asked.format_messages_for_llm([])
    sent[1]["content"].append({"type": "text", "text": "more"})
    sent[2]["tool_calls"][0]["function"]["name"] = "other"
    assert sent != written == asked.format_messages_for_llm([])
    assert asked.metrics is llm.metrics
