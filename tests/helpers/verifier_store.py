"""Episodes whose outcome stands in their text, and a tiny verifier for them; shared by the verifier's tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tiny_model import CHAT_TEMPLATE, write_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from train_store import store_of, stored
from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.templates import question
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Score, StopReason, Task, Trajectory
from openhands_rl_plugin.testing import example_trajectory

WORDS = ("fox", "dog", "brown", "lazy", "click", "search", "seven", "eight")
LONG = "System Message that describes the behavior Turn USER ASSISTANT the log is longer than context what stood"
GOOD, BAD = "tests pass", "error crash"


def tiny_judge(path: Path, **changes: Any) -> Path:
    """A random model with a tokenizer that has long words for the question, so that prompts are short."""
    write_model(path, max_position_embeddings=4096, hidden_size=64, initializer_range=0.3, vocab_size=1024, **changes)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=[chr(at) for at in range(32, 127)] + ["\n"],
        show_progress=False,
    )
    asked = "".join(str(message["content"]) for message in question("-" * 100))
    tokenizer.train_from_iterator([asked] * 9 + [" ".join([*WORDS, GOOD, BAD, LONG])] * 9, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return path


def episode(
    task: int,
    attempt: int,
    *,
    success: bool | None,
    turns: int = 2,
    evidence: JsonObject | None = None,
    words: int = 6,
    **changes: object,
) -> Trajectory:
    """Attempt at a task: the system message and the instruction are the task's, the last turn says how it went."""
    numbers = random.Random(f"{task}/{attempt}")
    chat = [Message(role="system", content="You are an agent."), Message(role="user", content=f"Solve task {task}.")]
    for turn in range(turns):
        text = " ".join(numbers.choices(WORDS, k=words))
        if turn < turns - 1:
            chat += [Message(role="assistant", content=text), Message(role="user", content=f"done {turn}")]
        else:
            chat.append(Message(role="assistant", content=f"{text} {GOOD if success else BAD}"))
    nodes = tuple(
        Node(parent=at - 1 if at else None, message=message, sampled=message.role == "assistant")
        for at, message in enumerate(chat)
    )
    own: JsonObject = {} if success is None else {"resolved": success}
    update = {
        "id": f"episode-{task}-{attempt}",
        "task": Task(id=f"task-{task}", environment="toy"),
        "group_id": f"group-{task}",
        "nodes": nodes,
        "head": len(nodes) - 1,
        "stop": StopReason.TERMINATED,
        "failure": None,
        "evidence": {**own, **(evidence or {})},
        **changes,
    }
    return example_trajectory(task * 100 + attempt).model_copy(update=update)


def toy_episodes(tasks: int = 12, attempts: int = 4) -> list[Trajectory]:
    """Half of the attempts at every task succeed."""
    return [episode(task, attempt, success=attempt % 2 == 0) for task in range(tasks) for attempt in range(attempts)]


def scores_in(path: Path) -> dict[str, list[Score]]:
    return {trajectory.id: list(scores) for trajectory, scores in stored(path)}


def trained_by_command(model: Path, folder: Path, *more: str) -> Path:
    """``openhands-rl train --verifier`` on ``folder/store``; the new version lies below ``folder/adapters``."""
    torch.set_num_threads(1)
    store = store_of(folder / "store", *toy_episodes(10))
    where = ["--model", str(model), "--adapters", str(folder / "adapters")]
    options = ["--set", "training.learning_rate=5e-3", "training.lora_rank=8", "training.num_epochs=4"]
    options += ["training.warmup_steps=2", "verifier.held_out=0.3"]
    assert cli.main(["train", str(store), "--verifier", *where, *options, *more]) == 0
    return folder / "adapters" / "verifier-v000001"
