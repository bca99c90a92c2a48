"""Our text of a conversation is that of the model's own Hugging Face chat template, character for character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conversations import FIXED, GOLDEN, TOOLS, Conversation, conversations, fitting
from hypothesis import given, settings
from official_templates import HOW_TO_GET, TAKE_OBJECTS, official_template, official_text, small_tokenizer, wire

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.templates.parsing import RenderError
from openhands_rl_plugin.core.templates.rendering import TEMPLATES, template_for
from openhands_rl_plugin.core.types import Message, ToolCall

EXPECTED = json.loads((Path(__file__).parent / "golden_renderings.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def official(family: str) -> str:
    if (found := official_template(family)) is None:
        pytest.skip(f"the official template of {family} is not installed: {HOW_TO_GET}")
    return found


def test_golden_renderings(family: str) -> None:
    """``make_golden_templates.py`` wrote them from the official templates, which need not be installed here."""
    for name, tools in GOLDEN:
        ours = template_for(family).render(fitting(family, FIXED[name], tools), tools)
        assert ours == EXPECTED[family][f"{name}, {len(tools)} tools"], name


def test_any_conversation(family: str, official: str) -> None:
    @settings(max_examples=100)
    @given(conversations)
    def check(conversation: Conversation) -> None:
        messages = fitting(family, *conversation)
        for generation in (True, False):
            ours = template_for(family).render(messages, conversation.tools, add_generation_prompt=generation)
            assert ours == official_text(family, official, messages, conversation.tools, generation)

    check()


def test_token_for_token(family: str, official: str) -> None:
    """The ids of our text are those that ``apply_chat_template`` gives, with a tokenizer that knows special tokens."""
    tokenizer = small_tokenizer(official)
    messages = fitting(family, FIXED["a call and its result"], TOOLS)
    wired = [wire(message, as_objects=family in TAKE_OBJECTS) for message in messages]
    options = {"enable_thinking": False} if family == "qwen3-no-thinking" else {}
    official_ids = tokenizer.apply_chat_template(
        wired, tools=list(TOOLS), add_generation_prompt=True, return_dict=False, **options
    )
    ours = template_for(family).render(messages, TOOLS)
    assert tokenizer(ours, add_special_tokens=False)["input_ids"] == official_ids
    assert len(official_ids) < len(ours) / 2


@pytest.mark.parametrize("family", ["llama3", "smollm2", "hermes"])
def test_a_template_without_calls_does_not_lose_them(family: str) -> None:
    message = Message(role="assistant", content="look", tool_calls=(ToolCall(name="f", arguments='{"x":  1}'),))
    text = template_for(family).render([Message(role="user", content="a"), message])
    assert 'look\n<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n</tool_call>' in text


def test_what_a_family_cannot_express_is_refused() -> None:
    calls = (ToolCall(name="f"), ToolCall(name="g"))
    with pytest.raises(RenderError, match="one call a turn"):
        template_for("llama3.1").render([Message(role="assistant", tool_calls=calls)])
    with pytest.raises(RenderError, match="add one"):
        template_for("llama3.1").render([Message(role="system", content="a")], TOOLS)
    with pytest.raises(RenderError, match="without messages"):
        template_for("qwen3").render([])
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        template_for("qwen-3")


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_answers_are_read_by_the_family(family: str) -> None:
    template = template_for(family)
    call = (
        '{"name": "f", "parameters": {"x": 1}}'
        if "llama" in family
        else '<tool_call>{"name": "f", "arguments": {"x": 1}}'
    )
    answer = template.parse(call + template.stop[0])
    assert answer.calls == (ToolCall(name="f", arguments='{"x": 1}'),) and not answer.after
    spoken = template.parse(f"done{template.stop[0]}")
    assert not spoken.calls and not spoken.problems
