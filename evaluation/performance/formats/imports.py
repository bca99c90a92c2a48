"""Whether records of other programs are read with nothing changed, and what of them is trained.

    python -m evaluation.performance.formats.imports [--episodes 200] [--json FILE]

The same random episodes (several turns with a call each, quotes, line breaks and other alphabets in the arguments,
reasoning) are written as each format has them, recognised, read, and compared field by field: role, text, reasoning,
name, arguments as JSON, and which result belongs to which call. Then all are given token ids by the stock chat
templates that TRL ships: how many of the answers' texts are trained whole, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openhands_rl_plugin.core.messages import reasoning_of
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.trajectories.exchange.formats import source_of

Chat = list[dict[str, Any]]
WORDS = ['"', "'", "\\n", "\n", "é", "ls", " -la ", "</p>", "{x}", "\u00a0", "日本", "<b>", "\t", "print(1)", "|"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name}.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "lines": {"type": "array"}}},
        },
    }
    for name in ("bash", "edit")
]


def episode(number: int) -> Chat:
    """A conversation in OpenAI's form, the same in every run."""
    source = random.Random(number)

    def text() -> str:
        return "".join(source.choices(WORDS, k=source.randrange(1, 12))).strip() or "."

    chat: Chat = [{"role": "system", "content": "Rules."}, {"role": "user", "content": f"Task {number}: {text()}"}]
    for turn in range(source.randrange(1, 6)):
        arguments = {"command": text(), "lines": [turn, source.randrange(9)]}
        call = {"id": f"c{turn}", "type": "function", "function": {"name": source.choice(("bash", "edit"))}}
        call["function"]["arguments"] = json.dumps(arguments)
        answer = {"role": "assistant", "content": text(), "tool_calls": [call], "reasoning_content": text()}
        result = {"role": "tool", "content": text(), "tool_call_id": f"c{turn}", "name": call["function"]["name"]}
        chat += [answer, result]
    return [*chat, {"role": "assistant", "content": text()}]


def as_atif(chat: Chat, name: str) -> dict[str, Any]:
    """Results are part of the step that called."""
    steps: list[dict[str, Any]] = []
    for message in chat:
        if message["role"] == "tool":
            result = {"source_call_id": message["tool_call_id"], "content": message["content"]}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = "agent" if message["role"] == "assistant" else message["role"]
        step = {"step_id": len(steps) + 1, "source": source, "message": message["content"]}
        if "reasoning_content" in message:
            step["reasoning_content"] = message["reasoning_content"]
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            step["tool_calls"] = [
                {"tool_call_id": at, "function_name": each["name"], "arguments": json.loads(each["arguments"])}
                for at, each in calls
            ]
        steps.append(step)
    agent = {"name": "a", "version": "1", "model_name": "m", "tool_definitions": TOOLS}
    return {"schema_version": "ATIF-v1.7", "session_id": name, "agent": agent, "steps": steps}


def as_sharegpt(chat: Chat, name: str) -> dict[str, Any]:
    """Calls are messages of their own; there is no place for reasoning with a call."""
    said: list[dict[str, str]] = []
    for message in chat[1:]:
        match message["role"]:
            case "user":
                said.append({"from": "human", "value": message["content"]})
            case "tool":
                said.append({"from": "observation", "value": message["content"]})
            case _:
                answer = {"from": "gpt", "value": message["content"]}
                reasoning = message.get("reasoning_content")
                said.append(answer if reasoning is None else {**answer, "reasoning_content": reasoning})
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    value = {"name": function["name"], "arguments": json.loads(function["arguments"])}
                    said.append({"from": "function_call", "value": json.dumps(value)})
    functions = [tool["function"] for tool in TOOLS]
    return {"id": name, "conversations": said, "system": "Rules.", "tools": json.dumps(functions)}


def as_protocol(chat: Chat, name: str) -> dict[str, Any]:
    """No system message, no reasoning."""
    content: list[dict[str, Any]] = []
    for message in chat[1:]:
        calls = message.get("tool_calls", ())
        if message["role"] == "assistant" and not calls:
            content.append({"class_": "message_action", "content": message["content"]})
        elif message["role"] == "assistant":
            function = calls[0]["function"]
            action = {"function": function["name"], "kwargs": json.loads(function["arguments"])}
            content.append({"class_": "api_action", "description": message["content"], **action})
        else:
            source = "user" if message["role"] == "user" else "environment"
            content.append({"class_": "text_observation", "source": source, "content": message["content"]})
    return {"id": name, "content": content, "details": {}}


INFO = {"exit_status": "Submitted", "submission": "diff"}
WRITERS: dict[str, Callable[[Chat, str], Any]] = {
    "sft-native": lambda chat, name: {"messages": chat, "tools": TOOLS, "instance_id": name},
    "atif": as_atif,
    "mini-swe-agent": lambda chat, name: {
        "messages": chat,
        "info": INFO,
        "instance_id": name,
        "trajectory_format": "mini-swe-agent-1.1",
    },
    "swe-agent": lambda chat, name: {
        "trajectory": [{"action": "", "observation": ""}],
        "history": chat,
        "info": INFO,
        "instance_id": name,
    },
    "nebius": lambda chat, name: {"trajectory": chat, "tools": TOOLS, "instance_id": name, "resolved": 1},
    "trl": lambda chat, name: {"prompt": chat[:2], "completion": chat[2:], "tools": TOOLS, "id": name},
    "sharegpt": as_sharegpt,
    "agent-data-protocol": as_protocol,
}
WITHOUT_REASONING = {"agent-data-protocol"}
WITHOUT_SYSTEM = {"agent-data-protocol"}
OWN_IDS = {"sharegpt", "agent-data-protocol"}
"""Formats without ids of calls: results stand behind their call."""


def fields(trajectory: Trajectory, reasoning: bool, ids: bool) -> list[Any]:
    """What is compared."""
    nodes = [trajectory.nodes[at] for at in trajectory.path()]
    return [
        [
            node.message.role,
            node.message.content or "",
            reasoning_of(node) if reasoning else None,
            [[call.id if ids else "", call.name, json.loads(call.arguments)] for call in node.message.tool_calls],
            node.message.tool_call_id if ids else None,
        ]
        for node in nodes
    ]


def expected(chat: Chat, reasoning: bool, ids: bool) -> list[Any]:
    """The same of the conversation itself."""
    return [
        [
            each["role"],
            each["content"],
            each.get("reasoning_content") if reasoning else None,
            [
                [call["id"] if ids else "", call["function"]["name"], json.loads(call["function"]["arguments"])]
                for call in each.get("tool_calls", ())
            ],
            each.get("tool_call_id") if ids else None,
        ]
        for each in chat
    ]


def read(name: str, chats: list[Chat], folder: Path) -> tuple[dict[str, float], list[Trajectory]]:
    """Counts of one format, and the episodes."""
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(json.dumps(WRITERS[name](chat, f"t{at}")) for at, chat in enumerate(chats)))
    started = time.perf_counter()
    found = [unit.read() for unit in source_of(file)]
    seconds = time.perf_counter() - started
    episodes = [each.trajectory for one in found for each in (one if isinstance(one, list) else [one])]
    reasoning, ids = name not in WITHOUT_REASONING, name not in OWN_IDS
    pairs = zip(episodes, chats, strict=True)
    cut = 1 if name in WITHOUT_SYSTEM else 0
    same = [fields(each, reasoning, ids) == expected(chat[cut:], reasoning, ids) for each, chat in pairs]
    calls = sum(len(message.tool_calls) for each in episodes for message in each.messages())
    recognised = float(all(each.strategy.options["format"] == name for each in episodes))
    return {"recognised": recognised, "equal": sum(same), "calls": calls, "a_second": len(same) / seconds}, episodes


def trained(family: str, episodes: list[Trajectory]) -> dict[str, float]:
    """Of the answers: how many are trained whole, once, each with its end of turn."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from openhands_rl_plugin.training.data.demonstrations import demonstration_samples

    template = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
    ends = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({each: at for at, each in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<bos>", eos_token=ends[0], additional_special_tokens=ends[1:]
    )
    tokenizer.chat_template = template
    whole = answers = sequences = 0
    for each in episodes:
        texts: list[str] = []
        for sample in demonstration_samples(each, tokenizer):
            sequences += 1
            run: list[int] = []
            for identity, mask in zip((*sample.input_ids, 0), (*sample.mask, False), strict=True):
                if mask:
                    run.append(identity)
                elif run:
                    texts.append(str(tokenizer.decode(run)))
                    run = []
        said = [node.message for node in each.sampled()]
        answers += len(said)
        for text, message in zip(texts, said, strict=True):
            calls = [json.loads(call.arguments) for call in message.tool_calls]
            names = all(call.name in text for call in message.tool_calls)
            written = all(json.dumps(value, ensure_ascii=False)[1:-1] in text for value in calls)
            plain = all(value["command"].strip() in text for value in calls)
            ended = sum(text.count(end) for end in ends) == 1 and text.endswith(tuple(ends))
            whole += names and (written or plain) and ended and (bool(calls) or (message.content or "") in text)
    return {"answers": answers, "trained_whole": whole, "sequences": sequences}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    chats = [episode(number) for number in range(options.episodes)]
    figures: dict[str, dict[str, float]] = {}
    native: list[Trajectory] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in WRITERS:
            figures[name], episodes = read(name, chats, Path(folder))
            native = native or episodes
    for family in ("qwen2_5", "qwen3", "llama3_1", "gemma3"):
        figures[family] = trained(family, native)
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{what} {value:,.0f}" for what, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
