"""What a server shows a model of a conversation, and what the trainer shows of it: one text, which is vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.templates import TEMPLATES, template_for
from openhands_rl_plugin.models.server.app import PromptRenderer
from openhands_rl_plugin.models.server.wire import ChatCompletionRequest
from openhands_rl_plugin.training.data.demonstrations import TokenMaker


def turns(body: str) -> str:
    cue = "{% if add_generation_prompt %}>{% endif %}"
    return "{% for m in messages %}<|im_start|>{{ m.role }}:" + body + "<|im_end|>{% endfor %}" + cue


TEXT = turns("{{ m.content }}")
THOUGHT = turns("{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.reasoning }}|{{ m.content }}")
PARTS = turns("{% for part in m['content'] %}[{{ part.text }}]{% endfor %}")
TOOLS = "{{ tools | tojson }}" + TEXT
# As Qwen2.5, Qwen3-Coder and DeepSeek-R1 print a call.
AS_JSON = turns("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}")
EACH = "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v }}{% endfor %}"
BY_NAME = turns("{% for c in m.tool_calls %}" + EACH + "{% endfor %}")
JOINED = turns("{% for c in m.tool_calls %}{{ c.function.name + '#' + c.function.arguments }}{% endfor %}")
PART = {"type": "text", "text": "So."}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "So.", **fields}


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tokenizer_of(folder: Path, template: Any) -> PreTrainedTokenizerFast:
    write_tokenizer(folder, template)
    return AutoTokenizer.from_pretrained(folder)


def shown(tokenizer: PreTrainedTokenizerFast, template: str | None = None, **body: Any) -> str:
    request = ChatCompletionRequest.model_validate({"tools": None, **body})
    return str(tokenizer.decode(PromptRenderer(tokenizer, template).chat(request)))


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        *((THOUGHT, assistant(**{name: "Hm."}), "(Hm.)Hm.|So.") for name in ("reasoning_content", "reasoning")),
        (THOUGHT, assistant(reasoning_content=None, reasoning=""), "|So."),
        (
            THOUGHT,
            assistant(content=[{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "So."}]),
            "(Hm.)Hm.|So.",
        ),
        (TEXT, assistant(content=[PART, PART]), "So.\nSo."),
        (PARTS, assistant(content=[PART, PART]), "[So.][So.]"),
        (PARTS, assistant(), "[So.]"),
        *((AS_JSON, calling(given), '{"name": "look", "arguments": {}}') for given in ("", "{}", "null", None, {})),
        (AS_JSON, {**calling('{"at":1}'), "content": "null"}, '{"name": "look", "arguments": {"at": 1}}'),
        *(
            (template, calling(given), text)
            for template, text in (
                (AS_JSON, '{"name": "look", "arguments": {"at": "é", "n": 1}}'),
                (BY_NAME, "<at>é<n>1"),
            )
            for given in ({"at": "é", "n": 1}, '{"at": "\\u00e9", "n":1}')
        ),
        (JOINED, calling('{"at":1}'), 'look#{"at":1}'),
        (AS_JSON, calling('{"at": '), '{"name": "look", "arguments": "{\\"at\\": "}'),
        (TEXT, calling("{}"), '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'),
        *((AS_JSON, assistant(tool_calls=none), "So.") for none in (None, [])),
    ],
)
def test_a_message_is_shown_as_by_vllm_and_trained_as_it_is_shown(
    tmp_path: Path, template: str, message: dict[str, Any], text: str
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    wanted = f"<|im_start|>assistant:{text}<|im_end|>>"
    assert shown(tokenizer, messages=[message]) == wanted
    assert TokenMaker(tokenizer).render([message], (), True) == wanted


def test_named_templates_are_chosen_by_whether_tools_are_offered(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, {"default": "plain" + TEXT, "tool_use": TOOLS})
    asked, offered = [{"role": "user", "content": "Hi"}], [LOOK]
    plain = "plain<|im_start|>user:Hi<|im_end|>>"
    function = '{"name": "look", "description": null, "parameters": {"type": "object", "properties": {}}}'
    with_tools = f'[{{"type": "function", "function": {function}}}]<|im_start|>user:Hi<|im_end|>>'
    assert shown(tokenizer, messages=asked) == TokenMaker(tokenizer).render(asked, (), True) == plain
    assert shown(tokenizer, messages=asked, tools=offered) == with_tools
    assert TokenMaker(tokenizer).render(asked, offered, True) == with_tools


# The system turn that Qwen's published templates render from a system message and three tools.
QWEN = (Path(__file__).parent / "qwen_system_message.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name.startswith("qwen")])
def test_qwen_lists_tools_as_its_own_template_does(family: str) -> None:
    tools = [json.loads(line) for line in QWEN.splitlines() if line.startswith('{"type"')]
    assert len(tools) == 3 and template_for(family).system("  You help.\n", tools) == QWEN


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown chat template 'qwen-3'; available: "):
        template_for("qwen-3")
