"""How a family lists tools, calls them and ends, and prompts by the tokenizer's own template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import write_tokenizer
from transformers import AutoTokenizer

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.templates.chat import TEMPLATES, template_for
from openhands_rl_plugin.core.types import Message, ToolCall

# The system turn that Qwen's published templates render from a system message and three tools.
QWEN = (Path(__file__).parent / "qwen_system_message.txt").read_text(encoding="utf-8")
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}"
    "{{ 'no' if enable_thinking is false else 'think' }}{% endif %}"
)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name.startswith("qwen")])
def test_qwen_lists_tools_as_its_own_template_does(family: str) -> None:
    tools = [json.loads(line) for line in QWEN.splitlines() if line.startswith('{"type"')]
    assert len(tools) == 3 and template_for(family).system("  You help.\n", tools) == QWEN


def test_a_prompt_is_that_of_the_tokenizers_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, THINKS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="look", arguments="{}"),))
    messages = (Message(role="user", content="Find it"), call)
    assert template_for("qwen3").render(tokenizer, messages) == "user: Find it;assistant: look;think"
    assert template_for("qwen3-no-thinking").render(tokenizer, messages[:1]) == "user: Find it;no"
    assert template_for("qwen3").render(tokenizer, messages[:1], add_generation_prompt=False) == "user: Find it;"


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        template_for("qwen-3")


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_a_completion_is_parsed_by_the_family(family: str) -> None:
    template = template_for(family)
    call = (
        '{"name": "f", "parameters": {"x": 1}}'
        if "llama" in family
        else '<tool_call>{"name": "f", "arguments": {"x": 1}}'
    )
    parsed = template.parse(call + template.stop[0])
    assert parsed.calls == (ToolCall(name="f", arguments='{"x": 1}'),) and not parsed.after
    spoken = template.parse(f"done{template.stop[0]}")
    assert not spoken.calls and not spoken.problems
