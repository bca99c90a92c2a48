"""A tiny random Llama that was taught to shop in two ways, one of which earns more: something to reinforce."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from small_shop import BAD, GOAL, GOALS, GOOD, INSTRUCTION, ShopSession, running_shop
from tiny_model import CHAT_TEMPLATE, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.environments.http.client import action_language, opening_messages
from openhands_rl_plugin.environments.http.react import parse_plain, parse_react
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

_STEPS = 60
_written: dict[str, Path] = {}  # what makes a model -> a folder with it


@contextmanager
def shop_and_server(model: Path, name: str) -> Iterator[tuple[str, str]]:
    """The URLs of a small shop and of a server of the model."""
    options = {"port": 0, "dtype": "float32", "max_batch": 8, "max_adapters": 64, "adapters": "/"}
    config = ServerConfig.model_validate({"model": str(model), "served_model_name": name, **options})
    with running_shop() as shop, running_server(config) as server:
        yield shop, server


type Way = tuple[str, ...]
"""The answers of an episode."""
type Message = dict[str, str]


def write_shopper(
    path: Path,
    ways: Mapping[int, Sequence[Way]] | None = None,
    *,
    react_format: bool = False,
    steps: int = _STEPS,
    seed: int = 0,
    context: int = 1536,
) -> Path:
    """A model directory whose model solves each goal in one of its ``ways``, each about as often; ``GOAL`` in either of
    the two above, where none are given (seconds)."""
    taught = [(goal, way) for goal, some in (ways or {GOAL: (GOOD, BAD)}).items() for way in some]
    dialogues = [dialogue_of(goal, way, react_format=react_format) for goal, way in taught]
    return write_taught(path, dialogues, steps=steps, seed=seed, context=context)


def write_taught(
    path: Path,
    dialogues: Sequence[Sequence[Message]],
    *,
    steps: int,
    seed: int = 0,
    context: int = 1536,
    vocabulary: int = 512,
) -> Path:
    """A model directory whose model answers as in one of the dialogues that begin as its prompt does."""
    same = repr((dialogues, steps, seed, context, vocabulary))
    if same in _written:
        return Path(shutil.copytree(_written[same], path))
    torch.manual_seed(seed)
    tokenizer = _tokenizer([message["content"] for dialogue in dialogues for message in dialogue], vocabulary)
    shape = {"max_position_embeddings": context, "vocab_size": vocabulary}
    write_model(path, seed=seed, initializer_range=0.05, **shape)
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids, labels = zip(*(encoded(tokenizer, dialogue) for dialogue in dialogues), strict=True)
    _teach(model, _rows(ids, tokenizer.pad_token_id), _rows(labels, -100), steps)
    model.save_pretrained(path)
    return _written.setdefault(same, path)


def _teach(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def dialogue_of(goal: int, way: Way, *, react_format: bool = False) -> list[Message]:
    """The messages of an episode, up to its last answer."""
    session = ShopSession(GOALS[goal])
    task = Task(id="webshop-1", environment="webshop", instruction=INSTRUCTION)
    opening = opening_messages(task, session.observation, react_format=react_format, actions=action_language("webshop"))
    messages = [{"role": message.role, "content": message.content or ""} for message in opening]
    for answer in way:
        parsed = parse_react(answer) if react_format else parse_plain(answer)
        state = parsed.error if parsed.action is None else session.step(parsed.action).state
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": state or ""}]
    return messages[:-1]


def _tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|im_end|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token=end, pad_token=end, chat_template=CHAT_TEMPLATE
    )


def encoded(tokenizer: PreTrainedTokenizerFast, dialogue: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Ids and labels of T tokens; only the answers carry labels."""
    ids: list[int] = []
    labels: list[int] = []
    for at, message in enumerate(dialogue):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(dialogue[:at], add_generation_prompt=True, return_dict=False)
        answer = tokenizer(message["content"] + tokenizer.eos_token, add_special_tokens=False).input_ids
        labels += [-100] * (len(prompt) - len(ids)) + answer
        ids = prompt + answer
    return ids, labels


def _rows(rows: Sequence[list[int]], end: int) -> torch.Tensor:
    """Each as long as the longest, with ``end`` after its own."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=end)
