"""``openhands-rl chat``: talk to a policy in the terminal, with the tools it was trained with.

examples:
  openhands-rl chat --base-url http://127.0.0.1:8100/v1 --model policy-v000007
  openhands-rl chat --base-url http://127.0.0.1:8100/v1 --model tiny --tools final my_tools:Search --record ./talks
  echo "What is 2 + 2?" | openhands-rl chat --base-url http://127.0.0.1:8100/v1 --model tiny

/reset starts a new conversation, /quit ends the command, Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import add_fields, read_fields
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.types import Message

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.chat_endpoint import AgentEvent, AgentResult, AgentRuntime

OWN_INTERRUPT = True

_PROMPT = "> "
_SHOWN = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``PolicyConfig``."""
    from openhands_rl_plugin.apps.chat_endpoint import PolicyConfig

    add_fields(parser, PolicyConfig)
    parser.set_defaults(run_id="chat")


def run(args: argparse.Namespace) -> int:
    """Talk until ``/quit`` or the end of the input; exit code 1 when the last question failed.

    Raises ``RLError`` when the options or the server cannot be used.
    """
    from openhands_rl_plugin.apps.chat_endpoint import PolicyConfig, open_runtime
    from openhands_rl_plugin.models.engines.server_models import listed_models

    with asyncio.Runner() as runner:
        config = read_fields(args, PolicyConfig)
        chat = Chat(open_runtime(config), runner)
        try:
            listed_models(config.base_url, os.environ.get(config.upstream_key_env))
            for line in _lines():
                if line == "/quit":
                    break
                chat.take(line)
        finally:
            chat.close()
    return 1 if chat.failed else 0


class Chat:
    """A conversation. ``runner`` has the event loop that runs all of it; ``failed``: the last question did."""

    def __init__(self, runtime: AgentRuntime, runner: asyncio.Runner) -> None:
        self._runtime = runtime
        self._runner = runner
        self._messages: tuple[Message, ...] = ()
        self.failed = False

    def close(self) -> None:
        """Close the runtime."""
        self._runner.run(self._runtime.aclose())

    def take(self, line: str) -> None:
        """Answer a question or execute a command. A question whose answer is interrupted is dropped."""
        if line == "/reset":
            self._messages = ()
            print("(a new conversation)", flush=True)
        elif line.startswith("/"):
            print(f"(unknown command {line.split()[0]}; use /reset or /quit)", flush=True)
        elif line:
            asked = (*self._messages, Message(role="user", content=line))
            try:
                result = self._runner.run(self._answer(asked))
            except KeyboardInterrupt:
                print("\n(stopped)", flush=True)
                if ENDING.number:
                    raise
            else:
                self.failed = result.failure is not None
                if not self.failed:
                    self._messages = (*asked, *result.messages)

    async def _answer(self, messages: tuple[Message, ...]) -> AgentResult:
        from openhands_rl_plugin.apps.chat_endpoint import AgentResult

        printer = _Printer()
        async with aclosing(self._runtime.stream(messages)) as events:
            async for event in events:
                printer.show(event)
                if isinstance(event, AgentResult):
                    return event
        raise AssertionError("a stream ends with an ``AgentResult``")


class _Printer:
    """Prints one answer. ``_turn``: the turn whose text is in the unfinished line, 0 for none."""

    def __init__(self) -> None:
        self._turn = 0

    def show(self, event: AgentEvent) -> None:
        """Print an event."""
        from openhands_rl_plugin.apps.chat_endpoint import AgentResult, TextDelta, ToolCallStarted

        match event:
            case TextDelta():
                if self._turn != event.turn:
                    self._end_line()
                self._turn = event.turn
                print(visible(event.text), end="", flush=True)
            case ToolCallStarted():
                self._line(f"[{event.name}] {_short(event.arguments)}")
            case AgentResult(answer=None, failure=failure):
                self._line(f"(no answer: {failure.message if failure else event.stop})")
            case AgentResult():
                self._end_line() if event.streamed else self._line(event.answer or "")
                if event.end["finish_reason"] == "length":
                    self._line("(cut off at --max-tokens)")
            case _:
                self._line(f"[{event.name}] {'-> ' if event.ok else 'failed: '}{_short(event.content)}")

    def _line(self, text: str) -> None:
        self._end_line()
        print(visible(text), flush=True)

    def _end_line(self) -> None:
        if self._turn:
            print(flush=True)
        self._turn = 0


def _lines() -> Iterator[str]:
    """The lines of standard input, with a prompt on a terminal."""
    shown = _PROMPT if sys.stdin.isatty() else ""
    while True:
        if shown:
            print(shown, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
