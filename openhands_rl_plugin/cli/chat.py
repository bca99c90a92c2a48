"""``openhands-rl chat``: talk to a served policy in the terminal, with tools.

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
import signal
import sys
from contextlib import aclosing

from openhands_rl_plugin.apps import chat_endpoint as agent
from openhands_rl_plugin.cli.options import add_fields, read_fields
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.types import Message
from openhands_rl_plugin.models.engines.client import listed_models

_SHOWN = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``PolicyConfig``."""
    add_fields(parser, agent.PolicyConfig)
    parser.set_defaults(run_id="chat")


def run(args: argparse.Namespace) -> int:
    """Talk until ``/quit`` or the end of the input; exit code 1 when the last question failed.

    A question whose answer is interrupted is dropped. Raises ``RLError`` when the options or the server cannot be used.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # stops an answer, not the command
    messages: tuple[Message, ...] = ()
    failed, config = False, read_fields(args, agent.PolicyConfig)
    with asyncio.Runner() as runner:
        runtime = agent.open_runtime(config)
        try:
            listed_models(config.base_url, os.environ.get(config.upstream_key_env))
            while line := _next_line():
                if (line := line.strip()) == "/quit":
                    break
                if line == "/reset":
                    messages = ()
                    print("(a new conversation)", flush=True)
                elif line:
                    asked = (*messages, Message(role="user", content=line))
                    try:
                        result = runner.run(_answer(runtime, asked))
                    except KeyboardInterrupt:
                        print("\n(stopped)", flush=True)
                        if ENDING.number:
                            raise
                    else:
                        failed = result.failure is not None
                        messages = messages if failed else (*asked, *result.messages)
        finally:
            runner.run(runtime.aclose())
    return int(failed)


def _next_line() -> str:
    """A line of standard input, with a prompt on a terminal; empty at the end."""
    print("> " if sys.stdin.isatty() else "", end="", flush=True)
    return sys.stdin.readline()


async def _answer(runtime: agent.AgentRuntime, messages: tuple[Message, ...]) -> agent.AgentResult:
    """Print what the policy answers and does, a turn at a time."""
    async with aclosing(runtime.stream(messages)) as events:
        async for event in events:
            match event:
                case agent.TurnText():
                    text = event.text
                case agent.ToolCallStarted():
                    text = f"[{event.name}] {event.arguments:.{_SHOWN}}"
                case agent.ToolResult():
                    text = f"[{event.name}] {'-> ' if event.ok else 'failed: '}{event.content:.{_SHOWN}}"
                case agent.AgentResult(answer=None, failure=failure):
                    text = f"(no answer: {failure.message if failure else event.stop})"
                case agent.AgentResult():
                    cut = event.end["finish_reason"] == "length"
                    text = f"{event.answer}{'\n(cut off at --max-tokens)' if cut else ''}"
            print(visible(text), flush=True)
            if isinstance(event, agent.AgentResult):
                return event
    raise AssertionError("a stream ends with an ``AgentResult``")
