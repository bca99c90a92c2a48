"""The agent endpoint: OpenAI's format, bounds, refusals, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from openhands_rl_plugin.apps.chat_endpoint import AgentRuntime, PolicyConfig, running_agent
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, ModelError
from openhands_rl_plugin.core.types import Completion, JsonObject, Limits, Message, PolicyRef, SamplingParams
from openhands_rl_plugin.environments.tools.environment import FinalTool, FunctionTool, ThinkTool, ToolOptions
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.testing import ScriptedEngine

pytestmark = pytest.mark.contract

SECRET = "the notes of nobody else"
QUESTIONS = ("How many?", "wait", "away", "refuse", "think")
ASK = [{"role": "user", "content": "How many?"}]


def look_up(word: str) -> str:
    """Find a word."""
    return f"found {word}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Player:
    """Answers as the last message says: ``wait`` forever, fail, or by a tool and then the answer."""

    def __init__(self) -> None:
        self.waiting = 0
        self.cancelled = 0
        self.asked: list[tuple[Message, ...]] = []

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        self.asked.append(tuple(messages))
        question = next(m.content for m in reversed(messages) if m.role == "user" and m.content in QUESTIONS)
        if question == "wait":
            self.waiting += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if question == "away":
            raise InfrastructureError("the model server is away")
        if question == "refuse":
            raise ModelError("the prompt is too long")
        if question == "think":
            return await ScriptedEngine([call("think", notes=SECRET)]).complete(messages)
        done = (messages[-1].content or "").startswith("<tool_response>")
        notes = call("think", notes=SECRET) + call("look_up", word="a")
        return await ScriptedEngine([call("final", answer="It is three.") if done else notes]).complete(messages)


@pytest.fixture
def player() -> Player:
    return Player()


@pytest.fixture
def url(player: Player) -> Iterator[str]:
    with running(player) as found:
        yield found


def running(
    player: Player | None, *, tools: tuple[str, ...] = (), key: str = "", **changes: Any
) -> AbstractContextManager[str]:
    upstream = {"base_url": "http://127.0.0.1:1/v1", "model": "agent-7", "upstream_key_env": key}
    policy = PolicyConfig.model_validate({**upstream, "tools": tools})
    runtime = player and AgentRuntime(
        player,
        (ThinkTool(), FunctionTool(look_up), FinalTool()),
        policy=PolicyRef(base_model="scripted"),
        options=ToolOptions(template="qwen3"),
        limits=Limits(max_turns=3),
    )
    return running_agent(ServerConfig.model_validate({"model": "agent-7", "port": 0, **changes}), policy, runtime)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **body}, timeout=20)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_is_the_final_one(url: str) -> None:
    answer = post(url, model="agent-7").json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is three.", "refusal": None, "tool_calls": None}
    assert choice["finish_reason"] == "stop" and answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] > 0
    assert SECRET not in json.dumps(answer)


def test_a_streamed_answer_tells_of_tools_but_not_of_notes(url: str) -> None:
    answer = post(url, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream") and SECRET not in answer.text
    *chunks, usage = events_of(answer)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    told = [delta["tool_event"] for delta in deltas if "tool_event" in delta]
    assert [(one["event"], one["name"]) for one in told] == [("started", "look_up"), ("result", "look_up")]
    assert told[1]["content"] == "found a" and told[1]["ok"] is True
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is three."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert usage["usage"]["total_tokens"] > 0 and usage["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_without_an_answer_the_limit_is_named_and_no_note_told(url: str, stream: bool) -> None:
    answer = post(url, messages=[{"role": "user", "content": "think"}], stream=stream)
    assert answer.status_code == 200 and SECRET not in answer.text
    choice = (events_of(answer)[-1] if stream else answer.json())["choices"][0]
    assert choice["finish_reason"] == "length" and choice["stop_reason"] == "max_turns"
    assert (choice["delta"] if stream else choice["message"]).get("content") is None


def test_the_conversation_reaches_the_model_with_one_system_message(url: str, player: Player) -> None:
    post(
        url,
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            *ASK,
        ],
    )
    system, *rest = player.asked[0]
    assert system.role == "system" and "Be kind." in (system.content or "")
    assert [(message.role, message.content) for message in rest] == [
        ("user", "one\ntwo"),
        ("assistant", "three"),
        ("user", "How many?"),
    ]


@pytest.mark.parametrize(("question", "status"), [("away", 503), ("refuse", 502)])
def test_failures_are_errors_and_no_answers(url: str, question: str, status: int) -> None:
    messages = [{"role": "user", "content": question}]
    answer = post(url, messages=messages)
    assert answer.status_code == status and "the " in answer.json()["error"]["message"]
    last = events_of(post(url, messages=messages, stream=True))[-1]
    assert last["error"]["code"] == status


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "unknown role"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools are the agent's own"),
        ({"n": 2}, 400, "n must be 1"),
        ({"model": "other"}, 404, "this is 'agent-7'"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused(url: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = post(url, **body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_a_key_is_asked_for_when_there_is_one_and_bodies_are_bounded(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_KEY", "sk-agent")
    with running(player, api_key_env="AGENT_KEY", max_body_bytes=2048) as url:
        assert post(url).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        with httpx.Client(base_url=url, headers={"authorization": "Bearer sk-agent"}) as client:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["agent-7"]
            long = {"messages": [{"role": "user", "content": "x" * 4000}]}
            assert client.post("/v1/chat/completions", json=long).status_code == 413


def test_what_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match="unknown tool 'finale'"), running(None, tools=("finale",)):
        pass
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"), running(None, key="NO_SUCH_KEY"):
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_episode(url: str, player: Player, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "wait"}], "stream": stream}
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body, timeout=30))
        await _until(lambda: player.waiting == 1)
        asking.cancel()
        await asyncio.wait({asking})
    await _until(lambda: player.cancelled)
    assert player.cancelled == 1


async def _until(reached: Any) -> None:
    async with asyncio.timeout(10):
        while not reached():
            await asyncio.sleep(0.01)
