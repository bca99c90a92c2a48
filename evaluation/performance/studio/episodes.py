"""Episodes that look like those of a coding agent: calls of tools, failures, searches, rewritten histories, tokens.

Everything follows from a seed. Token ids are those of ``words``, whose tokenizer ``write_tokenizer`` writes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.types import (
    Failure,
    Message,
    Node,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
    Usage,
)

BASE = "Qwen3-4B"
_PIECE = re.compile(r"\s?\w+|\s?[^\w\s]|\s")
_TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("terminal", "file_editor", "finish")
)


class Words:
    """Pieces of text as token ids, numbered as they are met."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<|im_start|>": 0, "<|im_end|>": 1}

    def encode(self, text: str) -> list[int]:
        """The ids of a text; new pieces get the next ones."""
        return [self.ids.setdefault(piece, len(self.ids)) for piece in _PIECE.findall(text)]

    def write_tokenizer(self, folder: Path) -> None:
        """``tokenizer.json`` that knows all that was encoded."""
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(models.WordLevel(self.ids, unk_token="<|im_end|>"))
        tokenizer.decoder = decoders.Fuse()
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class Play:
    """An episode that is being made: its nodes, and the ids that the model has seen on the path to the last one."""

    words: Words
    drawn: random.Random
    policy: PolicyRef
    nodes: list[Node] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    fresh: bool = True

    def hears(self, role: str, content: str, *, call: str | None = None, parent: int | None = None) -> int:
        """A message to the model, below the last node."""
        above = parent if parent is not None else (len(self.nodes) - 1 if self.nodes else None)
        message = Message.model_validate({"role": role, "content": content, "tool_call_id": call})
        self.nodes.append(Node(parent=above, message=message))
        self.pending += [0, *self.words.encode(f"{role}\n{content}"), 1]
        return len(self.nodes) - 1

    def says(self, text: str, calls: Sequence[ToolCall] = (), *, reward: float | None = None) -> int:
        """An answer that was sampled. Its prompt extends what was seen, unless the history was rewritten."""
        written = text + "".join(f"\n<tool_call>{each.name} {each.arguments}</tool_call>" for each in calls)
        sampled = [*self.words.encode(written), 1]
        prompt = self.pending if not self.fresh else [*self.seen, *self.pending]
        tokens = Tokens.of(prompt, sampled, (self._logprob() for _ in sampled), extends=not self.fresh)
        self.nodes.append(
            Node(
                parent=len(self.nodes) - 1,
                message=Message(role="assistant", content=text or None, tool_calls=tuple(calls)),
                sampled=True,
                tokens=tokens,
                policy=self.policy,
                sampling=SamplingParams(temperature=1.0),
                finish_reason="tool_calls" if calls else "stop",
                reward=reward,
            )
        )
        before = len(self.seen)
        self.seen += [*self.pending, *sampled]
        self.pending, self.fresh = [], False
        self.usage += Usage(
            prompt_tokens=len(self.seen) - len(sampled),
            cached_tokens=before,
            completion_tokens=len(sampled),
            calls=1,
            steps=1 if calls else 0,
        )
        return len(self.nodes) - 1

    def forgets(self, share: float = 0.5) -> None:
        """Drop a part of the conversation, so that the next prompt does not extend the one before."""
        kept = self.seen[: int(len(self.seen) * share)]
        self.seen, self.fresh = [*kept, *self.seen[-20:]], True

    def _logprob(self) -> float:
        kind = self.drawn.random()
        if kind < 0.62:
            return -self.drawn.random() * 0.01
        return -self.drawn.expovariate(2.2 if kind < 0.97 else 0.35)


_FILES = ("cart.py", "discounts.py", "orders.py", "parser.py", "cache.py", "config.py")
_THOUGHTS = (
    "The failure comes from `{file}`. I will look at how the total is rounded before I change anything.",
    "The test expects the discount to be applied once. `{file}` applies it in the loop and again at the end.",
    "Let me run the tests again to see whether the change holds.",
    "That is a different error: the import is gone. I will restore it and keep the fix.",
    "I want to see who else calls this function, so that nothing else breaks.",
    "The file has the old signature in two places; both need the new argument.",
)
_SOURCE = '''def total(items, discount=0.0):
    """The price of all items, with the discount taken off once."""
    amount = sum(item.price * item.count for item in items)
    return round(amount * (1.0 - discount), 2)
'''
_FAILED = """============================= test session starts ==============================
collected 14 items

tests/test_{name}.py ..F.F.........                                      [100%]

=================================== FAILURES ===================================
    def test_discount_is_applied_once():
>       assert total(ITEMS, 0.1) == 90.0
E       assert 81.0 == 90.0

FAILED tests/test_{name}.py::test_discount_is_applied_once - assert 81.0 == 90.0
========================= 2 failed, 12 passed in 0.41s =========================
"""
_PASSED = "\x1b[32m============================== 14 passed in 0.38s ==============================\x1b[0m\n"


def coding_episode(
    words: Words,
    identity: str,
    *,
    seed: int,
    task: str = "fix-discount",
    group: str = "group",
    run: str = "night",
    version: int | None = 3,
    turns: int = 8,
    reward: float | None = 1.0,
    failure: Failure | None = None,
    stop: StopReason | None = None,
    finished: float = 1.78e9,
    breaks: int = 0,
    split: str = "train",
) -> Trajectory:
    """An agent that repairs a function in a repository, in ``turns`` turns with a tool each."""
    drawn = random.Random(seed)
    policy = PolicyRef(base_model=BASE, adapter=None if version is None else "shop", version=version)
    play = Play(words, drawn, policy)
    name = task.removeprefix("fix-")
    instruction = f"The tests of `{name}` fail. Find out why, repair the code, and leave the tests as they are."
    play.hears("system", "You are a careful engineer. You work in /workspace with a terminal and an editor.")
    play.hears("user", instruction)
    # All samples of a task begin alike, so that a group has something in common.
    for turn in range(turns):
        choice = random.Random(f"{task} {turn}") if turn < 2 else drawn
        call, answer = _step(choice, name, turn, turns, bool(reward))
        thought = choice.choice(_THOUGHTS).format(file=choice.choice(_FILES))
        if breaks and turn and turn % max(2, turns // (breaks + 1)) == 0:
            play.forgets()
        play.says(thought, [call], reward=0.0)
        play.hears("tool", answer, call=call.id)
    if failure is None:
        play.says(
            "The discount is applied once now, and all tests pass." if reward else "I could not find the cause.",
            reward=reward,
        )
    ended = stop or (StopReason.ERROR if failure else StopReason.TERMINATED)
    return Trajectory(
        id=identity,
        run_id=run,
        group_id=group,
        task=Task(id=task, environment="workspace", instruction=instruction, split=split),
        strategy=StrategySpec(name="StandardReAct"),
        policy=policy,
        nodes=tuple(play.nodes),
        head=len(play.nodes) - 1,
        stop=ended,
        tools=_TOOLS,
        evidence={"patch": _patch(name)} if reward else {},
        failure=failure,
        usage=play.usage,
        times=Times(started=finished - 4.0 * turns - drawn.random() * 9, finished=finished),
    )


def _step(drawn: random.Random, name: str, turn: int, turns: int, solved: bool) -> tuple[ToolCall, str]:
    kind = drawn.random()
    if turn == 0 or turn == turns - 1 or kind < 0.35:
        arguments = {"command": f"python -m pytest -q tests/test_{name}.py"}
        answer = _PASSED if turn == turns - 1 and solved else _FAILED.format(name=name)
    elif kind < 0.6:
        arguments = {"command": f"grep -rn 'total(' src | head -{drawn.randrange(5, 30)}"}
        answer = "\n".join(f"src/{drawn.choice(_FILES)}:{drawn.randrange(9, 300)}:    total(items)" for _ in range(6))
    else:
        new = _SOURCE.replace("2)", f"{drawn.choice((3, 4))})")
        edit = {"command": "str_replace", "path": f"src/{drawn.choice(_FILES)}", "old_str": _SOURCE, "new_str": new}
        return _call(drawn, turn, "file_editor", edit), "The file has been edited."
    return _call(drawn, turn, "terminal", arguments), answer


def _call(drawn: random.Random, turn: int, name: str, arguments: dict[str, str]) -> ToolCall:
    return ToolCall(id=f"call-{turn}-{drawn.randrange(10**6)}", name=name, arguments=json.dumps(arguments))


def _patch(name: str) -> str:
    return (
        f"--- a/src/{name}.py\n+++ b/src/{name}.py\n@@ -1,4 +1,4 @@\n def total(items, discount=0.0):\n"
        "-    return round(amount * (1.0 - discount) * (1.0 - discount), 2)\n"
        "+    return round(amount * (1.0 - discount), 2)\n"
    )


def searched_episode(
    words: Words, identity: str, *, seed: int, nodes: int = 1000, finished: float = 1.78e9
) -> Trajectory:
    """A tree of MCTS with ``nodes`` nodes: proposals with visits and values, of which one a level was acted on."""
    drawn = random.Random(seed)
    policy = PolicyRef(base_model=BASE, adapter="shop", version=3)
    play = Play(words, drawn, policy)
    play.hears("system", "You shop for others. Say one move: search, click or buy.")
    acted = play.hears("user", "Find a kettle below 30 dollars with good reviews.")
    made, depth, chosen = play.nodes, 0, acted
    while len(made) < nodes:
        depth += 1
        frontier = [acted]
        for level, width in enumerate((18 if depth == 2 else drawn.randrange(4, 8), 3, 2)):
            frontier = [
                _proposal(play, parent, at, depth + level, drawn)
                for parent in frontier[: 9 if level else 1]
                for at in range(drawn.randrange(1, width + 1) if level else width)
                if len(made) < nodes
            ]
            if level == 0 and frontier:
                chosen = frontier[0]
        report: dict[str, JsonValue] = {**made[chosen].metadata, "search": _report(drawn)}
        made[chosen] = made[chosen].model_copy(update={"simulated": False, "reward": 0.0, "metadata": report})
        if len(made) < nodes:
            found = f"{drawn.randrange(2, 60)} results for the query"
            made.append(Node(parent=chosen, message=Message(role="tool", content=found)))
        acted = len(made) - 1
    return Trajectory(
        id=identity,
        run_id="night",
        group_id="kettle",
        task=Task(id="kettle", environment="webshop", instruction="Find a kettle below 30 dollars.", split="train"),
        strategy=StrategySpec(name="MCTS", options={"num_simulations": 60, "num_branches": 4}),
        policy=policy,
        nodes=tuple(made),
        head=chosen,
        stop=StopReason.TERMINATED,
        usage=Usage(prompt_tokens=180_000, completion_tokens=31_000, calls=nodes, steps=14),
        times=Times(started=finished - 210.0, finished=finished),
    )


def _proposal(play: Play, parent: int, at: int, depth: int, drawn: random.Random) -> int:
    value = max(-1.0, min(1.0, drawn.gauss(0.1 + 0.05 * depth - 0.04 * at, 0.3)))
    given_up = at > 2 and drawn.random() < 0.5
    metadata: dict[str, JsonValue] = {"search": {"dropped": "value below 0.1"}} if given_up else {}
    text = f"{drawn.choice(('search', 'click', 'buy'))}[{drawn.choice(('kettle', 'steel', 'reviews', 'next page'))}]"
    sampled = play.words.encode(text)
    play.nodes.append(
        Node(
            parent=parent,
            message=Message(role="assistant", content=text),
            sampled=True,
            tokens=Tokens.of((0,), sampled, (-0.2 for _ in sampled)),
            policy=play.policy,
            reward=0.0 if drawn.random() < 0.4 else None,
            simulated=True,
            value=round(value, 3),
            visits=max(1, int(60 / (1 + depth % 5) / (at + 1))),
            metadata=metadata,
        )
    )
    return len(play.nodes) - 1


def _report(drawn: random.Random) -> dict[str, JsonValue]:
    return {"simulations": 60, "calls": drawn.randrange(40, 90), "reused": drawn.randrange(0, 30), "forks": 22}


def long_episode(words: Words, identity: str, *, tokens: int = 35_000, nodes: int = 300) -> Trajectory:
    """About ``tokens`` tokens in about ``nodes`` nodes."""
    turns = (nodes - 3) // 2
    made = coding_episode(words, identity, seed=35, turns=turns, task="fix-orders", version=2)
    missing = max(0, tokens - sum(len(words.encode(node.message.content or "")) for node in made.nodes))
    share = missing // turns + 1
    grown = [
        node.model_copy(update={"message": node.message.model_copy(update={"content": _longer(node, share)})})
        if node.message.role == "tool"
        else node
        for node in made.nodes
    ]
    return made.model_copy(update={"nodes": tuple(grown)})


def _longer(node: Node, words: int) -> str:
    lines = "\n".join(f"src/orders.py:{at}: total(items)" for at in range(1, words // 9 + 1))
    return f"{node.message.content}\n{lines}"
