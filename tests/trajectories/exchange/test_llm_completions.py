"""Files that OpenHands' own LLM class writes while it is used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from exchange_samples import CODE, TOOLS, same_talk, trajectory

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.types import Message, Trajectory
from openhands_rl_plugin.trajectories.exchange.events import completion_files, read_completions

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

SINGLE = [*CODE[:4], CODE[7], CODE[8], CODE[9]]


def logged_by_openhands(folder: Path, messages: list[Message]) -> None:
    """Ask OpenHands' LLM for every answer of the conversation; what it sends is answered from it."""
    from litellm import ModelResponse
    from openhands.core.config import LLMConfig
    from openhands.llm.llm import LLM

    config = LLMConfig(
        model="openai/tiny",
        native_tool_calling=True,
        log_completions=True,
        log_completions_folder=str(folder),
        num_retries=1,
    )
    llm = LLM(config, service_id="agent")
    history: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        wire = to_wire(message)
        if message.role != "assistant":
            called = history[-1]["tool_calls"][0]["id"] if message.role == "tool" else None
            history.append(wire if called is None else {**wire, "tool_call_id": called})
            continue
        choice = {"index": 0, "finish_reason": "stop", "message": wire}
        answer = ModelResponse(id=f"r{at}", model="tiny", choices=[choice])
        llm._completion_unwrapped = lambda answer=answer, **kwargs: answer
        reply = llm.completion(
            messages=[{**each, "content": each["content"] or ""} for each in history], tools=[*TOOLS]
        )
        # OpenHands replays what the response says.
        history.append(to_wire(to_message(reply.choices[0].message.model_dump())))


def only(path: Path) -> Trajectory:
    (unit,) = read_completions(path)
    return unit.read().trajectory


def test_files_of_an_instance_are_one_conversation(tmp_path: Path) -> None:
    folder = tmp_path / "llm_completions" / "repo__repo-1"
    folder.mkdir(parents=True)
    logged_by_openhands(folder, SINGLE)
    assert len(list(folder.iterdir())) == 3
    found = only(tmp_path / "llm_completions")
    assert found.task.id == "repo__repo-1" and found.policy.base_model in {"openai/tiny", "tiny"}
    assert same_talk(found.messages(), SINGLE) and found.tools == TOOLS
    assert [node.parent for node in found.nodes] == [None, *range(len(found.nodes) - 1)]
    assert found.path() and all(node.tokens is None and node.reward is None for node in found.nodes)


def test_a_rewritten_history_is_a_branch(tmp_path: Path) -> None:
    def file(number: int, prompt: list[dict[str, Any]], answer: str) -> None:
        message = {"role": "assistant", "content": answer}
        record = {"messages": prompt, "response": {"id": str(number), "model": "m", "choices": [{"message": message}]}}
        (tmp_path / f"m-{number}.json").write_text(json.dumps({**record, "kwargs": {}, "timestamp": number}))

    system, ask = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    file(1, [system, ask], " one ")
    file(2, [system, ask, {"role": "assistant", "content": "one"}, {"role": "user", "content": "on"}], "two")
    file(3, [system, {"role": "user", "content": "condensed"}], "three")
    file(10, [{"role": "user", "content": "Summarise."}], "summary")
    found = only(tmp_path)
    assert [(node.parent, node.message.content) for node in found.nodes] == [
        (None, "s"),
        (0, "u"),
        (1, " one "),
        (2, "on"),
        (3, "two"),
        (0, "condensed"),
        (5, "three"),
        (None, "Summarise."),
        (7, "summary"),
    ]
    assert found.nodes[2].metadata["replayed_as"] == {"role": "assistant", "content": "one"}
    assert found.head == 6
    assert [node.message.content for node in found.sampled()] == [" one ", "two", "three"], "all but the summary"


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    episode = trajectory()
    for name, row in completion_files(episode):
        (tmp_path / name).write_text(json.dumps(row))
    found = only(tmp_path)
    assert found.messages() == tuple(CODE) and found.tools == episode.tools


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m-1.json").write_text('{"messages": [], "response": {"choices": []}}')
    with pytest.raises(RLError, match=re.escape(f"{tmp_path / 'm-1.json'}: response.choices: is empty")):
        only(tmp_path)
