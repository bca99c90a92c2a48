"""A tiny random Llama that was taught one conversation with tool calls: something to serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment as Jinja
from tiny_model import CHAT_TEMPLATE, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from openhands_rl_plugin.core.types import Message, Task, ToolCall
from openhands_rl_plugin.environments.tools.environment import (
    FinalTool,
    FunctionTool,
    ThinkTool,
    ToolBase,
    ToolEnvironment,
)

QUESTION = "What is 17 + 25?"
WIRE: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
"""The conversation that the model was taught to answer."""
NOTES = "private: add them"
ANSWER = "It is 42."
_STEPS = 120


def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


def tools() -> tuple[ToolBase, ...]:
    return (ThinkTool(), FunctionTool(add), FinalTool())


TURNS = (
    (("think", f'{{"notes": "{NOTES}"}}'), ("add", '{"a": 17, "b": 25}')),
    (("final", f'{{"answer": "{ANSWER}"}}'),),
)


async def write_caller(path: Path) -> Path:
    """A model directory whose model answers ``WIRE`` with ``TURNS`` (seconds)."""
    torch.manual_seed(0)
    environment = ToolEnvironment(tools=tools())
    messages = [*(await environment.reset(Task(id="add", environment="tools", data={"messages": WIRE}))).messages]
    parts: list[tuple[str, bool]] = [(_prompt(messages, environment.info.tools), False)]
    for calls in TURNS:
        # As the template writes it, so that each turn extends the one before and one sequence teaches all of them.
        written = (f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls)
        said = "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in written)
        parts.append((f"{said}<|im_end|>", True))
        made = tuple(ToolCall(id=name, name=name, arguments=given) for name, given in calls)
        action = Message(role="assistant", tool_calls=made)
        messages += [action, *(await environment.step(action)).messages]
        prompt, known = _prompt(messages, environment.info.tools), "".join(text for text, _ in parts)
        assert prompt.startswith(known)
        parts.append((prompt[len(known) :], False))
    tokenizer = _tokenizer([text for text, _ in parts])
    write_model(path, initializer_range=0.05, max_position_embeddings=8192)
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    _teach(model, *_encoded(tokenizer, parts))
    model.save_pretrained(path)
    return path


def _prompt(messages: Sequence[Message], offered: Sequence[Any]) -> str:
    wire = [
        {
            "role": message.role,
            "content": message.content or "",
            "tool_calls": [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in message.tool_calls
            ],
        }
        for message in messages
    ]
    jinja = Jinja()
    jinja.policies["json.dumps_kwargs"] = {"sort_keys": False, "ensure_ascii": False}
    return jinja.from_string(CHAT_TEMPLATE).render(messages=wire, tools=[*offered], add_generation_prompt=True)


def _encoded(tokenizer: PreTrainedTokenizerFast, parts: Sequence[tuple[str, bool]]) -> tuple[torch.Tensor, ...]:
    """Ids and labels of the conversation, of which the marked parts are taught."""
    ids, labels = [], []
    for text, taught in parts:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        labels += part if taught else [-100] * len(part)
    return torch.tensor([ids]), torch.tensor([labels])


def _teach(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=_STEPS)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
