"""A tiny random Llama that was taught one conversation with tool calls: something to serve."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment as Jinja
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[1] / "serving"))

from tiny_model import CHAT_TEMPLATE, write_model

from openhands_rl_plugin.environments.tools import FinalTool, FunctionTool, ThinkTool, ToolBase, ToolEnvironment
from openhands_rl_plugin.types import Message, Task, ToolCall

QUESTION = "What is 17 + 25?"
NOTES = "private: add them"
ANSWER = "It is 42."
_STEPS = 150


def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


def tools() -> tuple[ToolBase, ...]:
    return (ThinkTool(), FunctionTool(add), FinalTool())


CALLS = (
    ("think", f'{{"notes": "{NOTES}"}}'),
    ("add", '{"a": 17, "b": 25}'),
    ("final", f'{{"answer": "{ANSWER}"}}'),
)


async def write_caller(path: Path) -> Path:
    """A model directory whose model answers ``QUESTION`` with ``CALLS`` (seconds)."""
    torch.manual_seed(0)
    environment = ToolEnvironment(tools=tools())
    messages = [*(await environment.reset(Task(id="add", environment="tools", instruction=QUESTION))).messages]
    turns: list[tuple[str, str]] = []
    for name, arguments in CALLS:
        said = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        turns.append((_prompt(messages, environment.offered_tools), said + "<|im_end|>"))
        action = Message(role="assistant", tool_calls=(ToolCall(id="c", name=name, arguments=arguments),))
        messages += [action, *(await environment.step(action)).messages]
    tokenizer = _tokenizer([prompt + said for prompt, said in turns])
    write_model(path, initializer_range=0.05, max_position_embeddings=4096)
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    _teach(model, [_encoded(tokenizer, prompt, said) for prompt, said in turns])
    model.save_pretrained(path)
    return path


def _prompt(messages: Sequence[Message], offered: Sequence[Any]) -> str:
    import json

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


def _encoded(tokenizer: PreTrainedTokenizerFast, prompt: str, said: str) -> tuple[torch.Tensor, torch.Tensor]:
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, said))
    return torch.tensor([before + after]), torch.tensor([[-100] * len(before) + after])


def _teach(model: torch.nn.Module, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(_STEPS):
        loss = sum(model(input_ids=ids, labels=labels).loss for ids, labels in batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


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
