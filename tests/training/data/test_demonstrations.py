"""What is trained of a conversation that nobody sampled, with the stock chat templates of the families.

The templates are those that TRL ships unchanged (``trl/chat_templates``, whose README says of which checkpoint).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import ACTED, Completion, JsonObject, Message, PolicyRef, Task, ToolCall, Trajectory
from openhands_rl_plugin.training.data.demonstrations import TokenMaker, demonstration_samples, turns_for
from openhands_rl_plugin.trajectories.exchange.foreign import finished

sys.path.append(str(Path(__file__).parents[2] / "core" / "templates"))

from official_templates import HOW_TO_GET, official_template, small_tokenizer

POLICY = PolicyRef(base_model="other")
TOOLS: tuple[JsonObject, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name}.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
    for name in ("bash", "edit")
)


def call(identity: str, name: str, **arguments: object) -> ToolCall:
    return ToolCall(id=identity, name=name, arguments=json.dumps(arguments))


LS = call("c1", "bash", command='ls "a b"')
CODE = (
    Message(role="system", content="Rules."),
    Message(role="user", content="Fix it."),
    Message(role="assistant", content="A look.", tool_calls=(LS,)),
    Message(role="tool", content="a.py", tool_call_id="c1", name="bash"),
    Message(
        role="assistant", tool_calls=(call("c2", "bash", command="cat a.py"), call("c3", "edit", command="x\n  y"))
    ),
    Message(role="tool", content="1", tool_call_id="c2", name="bash"),
    Message(role="tool", content="done", tool_call_id="c3", name="edit"),
    Message(role="user", content="Go on."),
    Message(role="assistant", content="It is done."),
)


def episode(
    messages: Sequence[Message] = CODE, reasoning: str | None = None, tools: Sequence[JsonObject] = TOOLS
) -> Trajectory:
    tree = EpisodeTree(tools=tools)
    for message in messages:
        if message.role == "assistant":
            metadata: JsonObject = {"reasoning_content": reasoning} if reasoning else {}
            tree.commit(tree.propose(Completion(message=message, policy=POLICY, metadata=metadata)))
        else:
            tree.head = tree.append(message)
    return finished(tree, "sft-native", Task(id="t", environment="swe")).trajectory


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    template = official_template(family)
    if template is None:
        pytest.skip(HOW_TO_GET)
    return small_tokenizer(template)


def trained(tokenizer: PreTrainedTokenizerFast, trajectory: Trajectory) -> list[str]:
    """The texts that the mask covers, one a turn."""
    texts: list[str] = []
    for sample in demonstration_samples(trajectory, tokenizer):
        run: list[int] = []
        for identity, mask in zip((*sample.input_ids, 0), (*sample.mask, False), strict=True):
            if mask:
                run.append(identity)
            elif run:
                texts.append(str(tokenizer.decode(run)))
                run = []
    return texts


CALLS = {
    "qwen2.5": (
        'A look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\"a b\\""}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a.py"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "edit", "arguments": {"command": "x\\n  y"}}\n</tool_call><|im_end|>',
        "It is done.<|im_end|>",
    ),
    "qwen3": (
        "<think>\n\n</think>\n\nA look.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls \\"a b\\""}}\n</tool_call><|im_end|>',
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat a.py"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "edit", "arguments": {"command": "x\\n  y"}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is done.<|im_end|>",
    ),
    "llama3.1": (
        '{"name": "bash", "parameters": {"command": "ls \\"a b\\""}}<|eot_id|>',
        '{"name": "bash", "parameters": {"command": "cat a.py"}}<|eot_id|>',
        '{"name": "edit", "parameters": {"command": "x\\n  y"}}<|eot_id|>',
        "It is done.<|eot_id|>",
    ),
    "gemma3": (
        'A look.\n\n<function=bash>\n<parameter=command>ls "a b"</parameter>\n</function><end_of_turn>',
        "<function=bash>\n<parameter=command>cat a.py</parameter>\n</function><end_of_turn>",
        "<function=edit>\n<parameter=command>\nx\n  y\n</parameter>\n</function><end_of_turn>",
        "It is done.<end_of_turn>",
    ),
}


@pytest.mark.parametrize("family", CALLS)
def test_answers_are_trained_whole_and_nothing_else_is(family: str) -> None:
    # Qwen2.5 begins a turn that is nothing but calls with a second line break.
    tokenizer = tokenizer_of(family)
    assert [text.removeprefix("\n") for text in trained(tokenizer, episode())] == list(CALLS[family])
    assert len(demonstration_samples(episode(), tokenizer)) == (3 if family == "qwen3" else 1)
    # A prompt is tokenised whole by a server: the ids before each answer are the same.
    maker, held = TokenMaker(tokenizer), ()
    turns, tools = turns_for(episode(), maker.traits)
    for at, node in enumerate(maker.with_tokens(episode()).nodes):
        if node.tokens is not None:
            held = (*held, *node.tokens.prompt_ids) if node.tokens.extends else node.tokens.prompt_ids
            assert held == maker.ids(maker.render([turn.wire for turn in turns[:at]], tools, True))
            held = (*held, *node.tokens.sampled_ids)


def test_a_malformed_call_is_context_only() -> None:
    broken = Message(role="assistant", tool_calls=(ToolCall(id="c1", name="bash", arguments='{"command": "ls'),))
    messages = (*CODE[:2], broken, Message(role="tool", content="no JSON", tool_call_id="c1"), CODE[-1])
    assert trained(tokenizer_of("qwen2.5"), episode(messages)) == ["It is done.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('no such conversation') }}", "no such conversation"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "ends an answer with no special token"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}", "generation"),
    ],
)
def test_what_a_template_refuses_is_an_error_with_its_reason(template: str, expected: str) -> None:
    with pytest.raises(TrainingError, match=expected):
        demonstration_samples(episode(CODE[:2] + CODE[-1:]), small_tokenizer(template))


def test_every_segment_of_a_condensed_episode_is_trained_once() -> None:
    """A second path that begins anew: its first answer is on the other path, too, and is trained there."""
    tree = EpisodeTree(tools=TOOLS)
    for message in CODE[:4]:
        if message.role == "assistant":
            tree.commit(tree.propose(Completion(message=message, policy=POLICY, metadata={ACTED: True})))
        else:
            tree.head = tree.append(message)
    before = tree.head
    tree.commit(tree.propose(Completion(message=CODE[-1], policy=POLICY, metadata={ACTED: True})))
    tree.head = before
    tree.head = tree.append(Message(role="user", content="In short: a look was taken."))
    tree.commit(tree.propose(Completion(message=Message(role="assistant", content="Again."), policy=POLICY)))
    condensed = finished(tree, "x", Task(id="t", environment="swe")).trajectory
    texts = trained(tokenizer_of("qwen2.5"), condensed)
    assert sorted(texts) == sorted([CALLS["qwen2.5"][0], "It is done.<|im_end|>", "Again.<|im_end|>"])
