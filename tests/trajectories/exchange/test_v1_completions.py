"""Completion logs of OpenHands' V1 SDK, of a model that is prompted with text: one path, with native calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exchange_samples import CODE, SYSTEM, TOOLS

from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.templates import text_messages
from openhands_rl_plugin.trajectories.exchange.events import read_completions


def test_a_text_prompted_episode_is_one_path(tmp_path: Path) -> None:
    """The SDK logs the text in ``messages`` and ``raw_response``, the calls in ``raw_messages`` and ``response``."""
    single = [message for message in CODE if len(message.tool_calls) < 2 and message.tool_call_id not in ("c2", "c3")]
    folder = tmp_path / "repo__repo-1"
    folder.mkdir()
    answers = [at for at, message in enumerate(single) if message.role == "assistant"]
    for number, at in enumerate(answers):
        text = list(text_messages(single[: at + 1], TOOLS))
        record: dict[str, Any] = {
            "context_window": 0,
            "messages": text[:-1],
            "raw_messages": [to_wire(message) for message in single[:at]],
            "tools": [{"kind": "TerminalTool", "description": "Runs.", "action_type": "TerminalAction"}],
            "kwargs": {"temperature": 0},
            "response": {"model": "m", "choices": [{"message": to_wire(single[at])}]},
            "raw_response": {"model": "m", "choices": [{"message": text[-1]}]},
            "timestamp": 1000.0 + number,
        }
        (folder / f"m-{1000 + number}.json").write_text(json.dumps(record))
    (unit,) = read_completions(folder)
    found = unit.read()
    episode = found.trajectory
    assert episode.ends() == (episode.head,) and len(episode.nodes) == len(single[: answers[-1] + 1])
    assert [message.tool_calls for message in episode.messages()] == [message.tool_calls for message in single]
    assert (episode.messages()[0].content, episode.task.id) == (SYSTEM, "repo__repo-1")
    assert [tool["function"] for tool in episode.tools] == [{"name": "terminal", "description": "Runs."}]
