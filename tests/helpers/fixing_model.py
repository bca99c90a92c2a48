"""A tiny Llama whose weights are set by hand: it calls one tool at first and another one after a tool has answered."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_model import write_model, write_tokenizer
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM

FIRST, AGAIN, END = "<|first|>", "<|again|>", "<|im_end|>"
_CALL = "<tool_call>\n{call}\n</tool_call>"
# The assistant's header says what came before it, in the prompt as in the history, so that prompts extend each other.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|again|>' if loop.previtem is defined and loop.previtem.role == 'tool' else '<|first|>' }}"
    "{% else %}<|im_start|>{{ message.role }}\n{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|again|>' if messages[-1].role == 'tool' else '<|first|>' }}{% endif %}"
)
_CERTAIN = 5.0


def write_fixer(path: Path, first: tuple[str, dict[str, str]], again: tuple[str, dict[str, str]]) -> Path:
    """A model directory. ``first`` and ``again`` are names of tools with their arguments; each is one token."""
    write_model(path, num_hidden_layers=1, max_position_embeddings=32768, tie_word_embeddings=False)
    tokenizer = write_tokenizer(path, _TEMPLATE)
    calls = [_CALL.format(call=json.dumps({"name": name, "arguments": given})) for name, given in (first, again)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (FIRST, AGAIN, *calls)])
    tokenizer.save_pretrained(path)
    first_id, again_id, call_id, last_id, end_id = tokenizer.convert_tokens_to_ids([FIRST, AGAIN, *calls, END])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # What comes next depends on the last token alone, each kind of which has a direction of its own.
        seen, said = model.model.embed_tokens.weight, model.lm_head.weight
        seen.zero_()
        said.zero_()
        seen[:, 0] = 1.0
        for direction, (tokens, follower) in enumerate(
            [((first_id,), call_id), ((again_id,), last_id), ((call_id, last_id), end_id)], start=1
        ):
            seen[list(tokens), 0], seen[list(tokens), direction] = 0.0, 1.0
            said[follower, direction] = _CERTAIN
    model.save_pretrained(path)
    return path
