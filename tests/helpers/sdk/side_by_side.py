"""The same script executed by the stock agent and by ``RLAgent``, each in the same folder as it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openhands.sdk import Agent
from openhands.sdk.conversation import ConversationExecutionStatus, LocalConversation
from openhands.sdk.event import Event
from scripted_model import ScriptedModel
from sdk_play import EDITOR, converse, make_agent, make_llm, stored

from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.types import Trajectory

# What RLAgent adds to a request: token ids, a seed, and the neutral values of what a server would fill in.
_ADDED = frozenset(
    {"return_token_ids", "logprobs", "seed", "temperature", "top_p", "max_tokens", "max_completion_tokens"}
    | {"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stream", "stream_options"}
)
_IDS = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|\b[0-9a-f]{32}\b|chatcmpl-\d+|rl-[0-9a-f]+-\d+")
_DATES = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:[\d.]+(?:Z|[+-]\d\d:\d\d)?")
_TIMES = ("duration", "elapsed", "latency")


@dataclass(frozen=True)
class Side:
    """One of two: what happened, without ids and times, and what the model was sent."""

    events: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    status: ConversationExecutionStatus
    files: dict[str, str]
    heard: list[Any]
    tokens: tuple[int, int]

    def kinds(self) -> list[str]:
        """The events' classes, in order."""
        return [event["kind"] for event in self.events]

    def texts(self) -> str:
        """All events as text."""
        return json.dumps(self.events)


Drive = Callable[[LocalConversation], object]


def ask(conversation: LocalConversation) -> None:
    """Send a task and run until the agent stops."""
    conversation.send_message("Correct calc.py.")
    conversation.run()


async def side_by_side(
    server: ScriptedModel,
    workspace: Path,
    answers: Iterable[dict[str, Any]],
    drive: Drive = ask,
    *,
    tools: tuple[str, ...] = (EDITOR,),
    llm: Mapping[str, Any] = {},
    agent: Callable[[str], Mapping[str, Any]] = lambda model: {},
    conversation: Callable[[list[Any]], Mapping[str, Any]] = lambda heard: {},
) -> tuple[Side, Side, list[Trajectory]]:
    """The stock agent's side, RLAgent's, and what was stored of the latter.

    ``llm``, ``agent`` (of the model's name) and ``conversation`` (of a list, which becomes ``heard``) are further
    arguments of the SDK's classes.
    """
    model, script, kept = "side", list(answers), workspace.parent / "untouched"
    shutil.copytree(workspace, kept)
    sides = []
    for ours in (False, True):
        shutil.rmtree(workspace)
        shutil.copytree(kept, workspace)
        server.scripts[model].clear()
        server.requests[model].clear()
        server.script(model, script)
        made = make_agent(make_llm(server, model, **llm), workspace.parent / "store", tools=tools, **agent(model))
        if not ours:
            fields = {name: getattr(made, name) for name in Agent.model_fields if name != "kind"}
            made = Agent(**fields)
        heard: list[Any] = []
        talk = converse(made, workspace, **conversation(heard))
        drive(talk)
        counted = talk.conversation_stats.get_combined_metrics().accumulated_token_usage
        sides.append(
            Side(
                events=_plain(talk.state.events),
                requests=_sent(server.requests[model]),
                status=talk.state.execution_status,
                files={each.name: each.read_text() for each in sorted(workspace.iterdir()) if each.is_file()},
                heard=heard,
                tokens=(counted.prompt_tokens, counted.completion_tokens) if counted else (0, 0),
            )
        )
        talk.close()
    return sides[0], sides[1], await stored(workspace.parent / "store")


def same(stock: Side, ours: Side, *, texts_only: bool = False, streamed: bool = False) -> None:
    """Assert that both are equal in all that a user, and a model, can see.

    ``texts_only``: content may be sent as text or as a list of one, and a call with empty text or none. ``streamed``:
    old releases count the tokens of a stream themselves.
    """
    assert ours.kinds() == stock.kinds()
    for mine, theirs in zip(ours.events, stock.events, strict=True):
        assert mine == theirs
    assert len(ours.requests) == len(stock.requests)
    for mine, theirs in zip(ours.requests, stock.requests, strict=True):
        if texts_only:
            mine, theirs = _texts(mine), _texts(theirs)
        for got, meant in zip(mine["messages"], theirs["messages"], strict=True):
            assert got == meant
        assert mine == theirs
    assert (ours.status, ours.files, ours.heard) == (stock.status, stock.files, stock.heard)
    assert ours.tokens == stock.tokens or streamed


def _texts(body: dict[str, Any]) -> dict[str, Any]:
    plain = ({**message, "content": text_of(message.get("content"))} for message in body["messages"])
    messages = [{name: value for name, value in message.items() if value} for message in plain]
    return {"messages": messages, "tools": body.get("tools")}


def _plain(events: Iterable[Event]) -> list[dict[str, Any]]:
    names: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"#{len(names)}")

    plain = []
    for event in events:
        text = _IDS.sub(name, _DATES.sub("#time", event.model_dump_json()))
        plain.append(json.loads(text, object_hook=_without_times))
    return plain


def _without_times(found: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if not any(word in key for word in _TIMES)}
    if "forgotten_event_ids" in kept:
        kept["forgotten_event_ids"] = sorted(kept["forgotten_event_ids"])
    return kept


def _sent(requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    sent = []
    for body in requests:
        kept = {key: value for key, value in body.items() if key not in _ADDED}
        sent.append(json.loads(_IDS.sub("#", json.dumps(kept))))
    return sent
