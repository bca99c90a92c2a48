"""A tiny Llama whose weights are set by hand: it says one thing at first, or one of several, and another afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_model import write_model, write_tokenizer
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM

FIRST, AGAIN, END = "<|first|>", "<|again|>", "<|im_end|>"
_CALL = "<tool_call>\n{call}\n</tool_call>"
# The assistant's header says what came before it, in the prompt as in the history, so that prompts extend each other.
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% set answered = namespace(before=false) %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|again|>' if answered.before else '<|first|>' }}{% set answered.before = true %}"
    "{% else %}<|im_start|>{{ message.role }}\n{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|again|>' if answered.before else '<|first|>' }}{% endif %}"
)
_CERTAIN = 5.0


def write_fixer(path: Path, first: tuple[str, dict[str, str]], again: tuple[str, dict[str, str]]) -> Path:
    """A model directory. ``first`` and ``again`` are names of tools with their arguments; each is one token."""
    call, last = (_CALL.format(call=json.dumps({"name": name, "arguments": given})) for name, given in (first, again))
    return write_chooser(path, [call], last)


def write_chooser(path: Path, first: Sequence[str], again: str, texts: Sequence[str] = ()) -> Path:
    """A model directory: it begins with one of ``first``, each as likely, and goes on with ``again``, a token each.

    ``texts``: what the tokenizer learns to write shortly, beside a few words.
    """
    vocabulary = {"vocab_size": 2048} if texts else {}
    write_model(path, num_hidden_layers=1, max_position_embeddings=32768, tie_word_embeddings=False, **vocabulary)
    tokenizer = write_tokenizer(path, _TEMPLATE, texts)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (FIRST, AGAIN, *first, again)])
    tokenizer.save_pretrained(path)
    first_id, again_id, *choices, last_id, end_id = tokenizer.convert_tokens_to_ids([FIRST, AGAIN, *first, again, END])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # What comes next depends on the last token alone, each kind of which has a direction of its own.
        seen, written = model.model.embed_tokens.weight, model.lm_head.weight
        seen.zero_()
        written.zero_()
        seen[:, 0] = 1.0
        followers = [((first_id,), choices), ((again_id,), [last_id]), ((*choices, last_id), [end_id])]
        for direction, (tokens, follows) in enumerate(followers, start=1):
            seen[list(tokens), 0], seen[list(tokens), direction] = 0.0, 1.0
            written[follows, direction] = _CERTAIN
        # A direction of its own for each choice, which nothing points in until one is learnt.
        for direction, choice in enumerate(choices, start=4):
            written[choice, direction] = 1.0
    model.save_pretrained(path)
    return path
