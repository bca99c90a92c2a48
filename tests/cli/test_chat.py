"""``openhands-rl chat`` and ``serve --base-url`` as processes, against a model server on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from raw_server import raw_server, respond

CHAT = [sys.executable, "-m", "openhands_rl_plugin.cli", "chat", "--model", "m"]


def answer(text: str, **call: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if call:
        function = {"name": call.pop("name"), "arguments": json.dumps(call)}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    return {"id": "r", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def listing(reply: Any) -> Any:
    return lambda path, body: reply(path, body) if body else respond({"data": []})


async def talk(reply: Any, lines: str, *options: str) -> tuple[str, list[Any]]:
    """What a chat prints when ``lines`` are piped into it, and what the server was asked."""
    async with raw_server(listing(reply)) as server:
        command = [*CHAT, "--base-url", f"{server.url}/v1", *options]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        printed, _ = await process.communicate(lines.encode())
        assert process.returncode == 0, printed.decode()
    return printed.decode(), [body for _, body in server.requests[1:]]


async def test_a_conversation_goes_on_until_it_is_reset(tmp_path: Path) -> None:
    def reply(path: str, body: Any) -> Any:
        if (last := body["messages"][-1]["content"]) == "bad":
            return respond({"error": {"message": "too long"}}, "400 Bad Request")
        return respond(answer(f"You said {last}.\x1b[31m\u202e"))

    printed, asked = await talk(reply, "one\n\nbad\ntwo\n/reset\nthree\n/quit\n4\n", "--record", str(tmp_path))
    printed, refused = re.subn(r"\(no answer: ModelError:.*too long.*\)\n", "", printed)
    assert refused == 1, printed
    assert printed == (
        "You said one.\\x1b[31m\\u202e\nYou said two.\\x1b[31m\\u202e\n"
        "(a new conversation)\nYou said three.\\x1b[31m\\u202e\n"
    )
    assert [[message["content"] for message in body["messages"]] for body in asked] == [
        ["one"],
        ["one", "You said one.\x1b[31m\u202e", "bad"],
        ["one", "You said one.\x1b[31m\u202e", "two"],
        ["three"],
    ]
    command = [sys.executable, "-m", "openhands_rl_plugin.cli", "list", str(tmp_path), "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 4


LOOK_UP = """
from openhands_rl_plugin import ToolBase
class LookUp(ToolBase):
    name, description, parameters = "look_up", "Look a word up.", {"type": "object"}
    async def call(self, arguments):
        return "found " + arguments["word"]
"""


async def test_tools_are_shown_and_notes_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(path: str, body: Any) -> Any:
        texts = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if not texts:
            return respond(answer("", name="think", notes="SECRET"))
        if texts[-1] == "noted":
            return respond(answer("", name="look_up", word="a"))
        return respond(answer("", name="final", answer="It is three."))

    (tmp_path / "chat_tools.py").write_text(LOOK_UP, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    printed, asked = await talk(reply, "How many?\n", "--tools", "think", "final", "chat_tools:LookUp")
    assert printed == '[look_up] {"word": "a"}\n[look_up] -> found a\nIt is three.\n'
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["think", "final", "look_up"]


async def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    async def reply(path: str, body: Any) -> Any:
        if body["messages"][-1]["content"] == "wait":
            await asyncio.sleep(60)
        return respond(answer("good"))

    async with raw_server(listing(reply)) as server:
        command = [*CHAT, "--base-url", f"{server.url}/v1"]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"wait\n")
        async with asyncio.timeout(90):
            while len(server.requests) < 2:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert await process.stdout.readline() == b"\n"
            assert await process.stdout.readline() == b"(stopped)\n"
        printed, _ = await process.communicate(b"fine\n")
    assert printed == b"good\n" and process.returncode == 0
    assert [message["content"] for message in server.requests[-1][1]["messages"]] == ["fine"]


async def test_a_policy_with_tools_is_served_until_it_is_stopped() -> None:
    async with raw_server(lambda path, body: respond(answer("good"))) as server:
        command = [sys.executable, "-m", "openhands_rl_plugin.cli", "serve", "--model", "m", "--port", "0"]
        process = await asyncio.create_subprocess_exec(
            *command, "--base-url", f"{server.url}/v1", stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert "with no tools" in line
        base_url = line.split(" at ")[1].split(";")[0]
        async with httpx.AsyncClient() as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            response = await client.post(f"{base_url}/chat/completions", json=body, timeout=20)
        assert response.json()["choices"][0]["message"]["content"] == "good"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
