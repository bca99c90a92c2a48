"""``openhands-rl run``: let the agent work on a task in a folder, or run another agent's command, and record it.

examples:
  openhands-rl run -t "Make the failing test pass" --model policy --base-url http://127.0.0.1:8100/v1
  openhands-rl run -t "Make the failing test pass" --workspace ./my-repository --config config.toml
  openhands-rl run -t "Make the failing test pass" --attempts 4 --config config.toml --store ./trajectories
  openhands-rl run -f task.md --set rollout_strategy=BestOfN --set max_turns=30
  echo "Say what this code does" | openhands-rl run -f -
  openhands-rl run --base-url http://127.0.0.1:8100/v1 --store ./trajectories -- python my_agent.py
  openhands-rl run --set rollout_strategy=BestOfN --base-url http://127.0.0.1:8100/v1 -- mini -t "Make it pass" -y

The agent is that of OpenHands V0 where it is installed, else of V1 (its SDK); [rl] host decides where both are. Of the
file only [llm] and [rl] count. Commands stay in the folder ([rl.workspace]). Ctrl-C stops it; what was sampled stays.

A command after -- is any other agent. Its completions are recorded on their way to the model server: OPENAI_BASE_URL,
OPENAI_API_BASE, LLM_BASE_URL and ANTHROPIC_BASE_URL name an address of this process. It runs with your rights, and its
exit code is returned. With --set rollout_strategy=... or max_turns=... each of its chat completions is decided by that
strategy, which compares what the model proposes: nothing is forked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from openhands_rl_plugin.cli.options import add_settings, positive
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import OwnWork, changed, work_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import one_line, visible
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeGrowth, TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Message, Node
from openhands_rl_plugin.models.engines.openai_wire import parse_object

PATIENCE, _COMMAND_SECONDS = 35.0, 10.0
"""Seconds after a signal: in all, and for the command to end."""
_KEYS = ("OPENAI_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY")
_LONGEST = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The task or the command, the folder, the model and the settings."""
    task = parser.add_mutually_exclusive_group()
    task.add_argument("-t", "--task", metavar="TEXT", help="what is to be done")
    task.add_argument("-f", "--file", metavar="FILE", help="a file with the task; -: standard input")
    folder = "folder that the agent works in (default: this one)"
    parser.add_argument("--workspace", type=Path, default=Path(), metavar="DIR", help=folder)
    parser.add_argument("--create", action="store_true", help="make the folder of --workspace where there is none")
    several = "roll out the task so many times, each in a copy of the folder: a group that can be trained on"
    parser.add_argument("--attempts", type=positive, default=1, metavar="COUNT", help=several)
    add_settings(parser)
    store = "folder of the episodes (default: [rl.storage] path)"
    parser.add_argument("--store", default="", metavar="DIR", help=store)
    model = "the model's name on its server; over [llm] and [rl.serving]"
    parser.add_argument("--model", default="", metavar="NAME", help=model)
    server = "OpenAI-compatible server of the model, up to and including /v1"
    parser.add_argument("--base-url", default="", metavar="URL", help=server)
    parser.add_argument("agent", nargs="*", metavar="-- COMMAND", help="run this command instead, and record it")


def run(args: argparse.Namespace) -> int:
    """Roll out the task; exit code 1 where an attempt failed, 130 after Ctrl-C. Of a command: its exit code.

    Raises ``ConfigError``.
    """
    given = args.task is not None or args.file is not None
    if given == bool(args.agent):
        raise ConfigError("give either a task (-t TEXT, -f FILE) or a command after --")
    if args.create:
        args.workspace.mkdir(parents=True, exist_ok=True)
    if not args.workspace.is_dir():
        raise ConfigError(f"--workspace: there is no folder {args.workspace}; --create makes it")
    run_id = f"run-{uuid.uuid4().hex}"
    task = None if args.agent else _task(args)
    stored = ["storage_backend=file", f"storage.path={json.dumps(args.store)}"] if args.store else []
    named = {"model": args.model, "base_url": args.base_url, "needs_model": not args.agent}
    work = work_of(args.config, [*args.set, *stored], **named)
    if task is None:
        if args.attempts > 1:
            raise ConfigError("--attempts: of a task; a command is run again by the same line again")
        opened = not {"rollout_strategy", "max_turns"}.isdisjoint(changed(args.set))
        command = partial(_run_command, args.agent, args.workspace, work, run_id, opened)
        return ENDING.run(_recorded(work.settings, run_id, command))
    from openhands_rl_plugin.hosts.pool import task_attempts

    attempts = task_attempts(task, args.workspace, work, run_id, args.attempts)
    return ENDING.run(_recorded(attempts[0], run_id, partial(_run_attempts, *attempts)))


async def _recorded(settings: RLSettings, run_id: str, roll_out: Callable[[TrajectoryStorage], Awaitable[int]]) -> int:
    """Roll out episodes into the storage, and print what was recorded. Returns the exit code of ``roll_out``."""
    from openhands_rl_plugin.config.build import open_storage
    from openhands_rl_plugin.hosts.shared.sessions import group_summary, run_summary

    storage = open_storage(settings)
    try:
        code = await roll_out(storage)
    finally:
        recorded = [each async for each in storage.find(TrajectoryFilter(run_id=run_id, finished=None))]
        await storage.close()
        for trajectory, scores in recorded:
            _show(run_summary(trajectory, scores, settings))
        if len(attempts := [each for each in recorded if each[0].group_id == run_id]) > 1:
            _show(group_summary(attempts, settings))
    if not recorded:
        _show("nothing was recorded: the command did not send a completion to the address in OPENAI_BASE_URL")
    return code


async def _run_attempts(
    settings: RLSettings, attempts: Sequence[tuple[EpisodeRequest, Any]], storage: TrajectoryStorage
) -> int:
    from openhands_rl_plugin.hosts.pool import local_runner
    from openhands_rl_plugin.hosts.shared.sessions import judged

    failed = False
    for request, options in attempts:
        if len(attempts) > 1:
            _show(f"attempt {request.sample + 1} of {len(attempts)}, in {options.folder}")
        runner = local_runner(settings, options, storage=cast(TrajectoryStorage, _Watched(storage)))
        trajectory = await runner.run(request)
        await judged(storage, trajectory, settings.reward)
        failed |= trajectory.failure is not None
    return int(failed)


class _Watched:
    """The storage of an episode whose answers are printed when the agent acts on them."""

    def __init__(self, storage: TrajectoryStorage) -> None:
        self._storage, self._nodes, self._head = storage, list[Node](), cast(int | None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def grow(self, growth: EpisodeGrowth) -> None:
        await self._storage.grow(growth)
        self._nodes += growth.nodes
        if growth.head is not None and growth.head != self._head and self._nodes[growth.head].sampled:
            _show_answer(self._nodes[growth.head].message)
        self._head = growth.head


def _task(args: argparse.Namespace) -> str:
    try:
        if (text := args.task) is None:
            text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file: {args.file} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError("the task is empty; say what is to be done")
    return text


async def _run_command(
    words: Sequence[str], folder: Path, work: OwnWork, run_id: str, opened: bool, storage: TrajectoryStorage
) -> int:
    """Run a command whose completions are recorded as one episode. ``opened``: the strategy decides each of them."""
    import httpx

    from openhands_rl_plugin.session.client_sessions import GatewayConfig
    from openhands_rl_plugin.session.gateway import running_gateway

    settings, serving = work.settings, work.settings.serving
    upstream, key = work.llm.get("base_url") or serving.base_url, str(work.llm.get("api_key") or "none")
    if not upstream:
        raise ConfigError("which model server? give --base-url URL, or a file with [llm] base_url")
    session = run_id.removeprefix("run-")
    config = GatewayConfig(
        upstream=str(upstream),
        port=0,
        api_key_env="",
        upstream_key_env=serving.api_key_env if upstream == serving.base_url else "",
        run_id=run_id,
        base_model=serving.model,
        adapters_path=serving.adapters_directory,
        restore_calls=True,
    )
    async with (
        running_gateway(config, storage, settings=settings) as url,
        httpx.AsyncClient(trust_env=False, timeout=None) as client,
    ):
        base = f"{url}/session/{session}"
        versioned = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"), f"{base}/v1")
        keys = {name: key if key != "none" else os.environ.get(name, key) for name in _KEYS}
        environ = {**os.environ, **versioned, **keys, "ANTHROPIC_BASE_URL": base}
        if opened:
            answer = await client.post(f"{url}/session", json={"session": session})
            if answer.is_error:
                raise ConfigError(answer.json()["error"]["message"])
        code, interrupted = await _executed(words, folder, environ)
        if not interrupted:
            await client.post(f"{base}/end", json={"evidence": {"exit_code": code}})
    return code


async def _executed(words: Sequence[str], folder: Path, environ: dict[str, str]) -> tuple[int, bool]:
    """The exit code of the command, and whether a signal to this process ended it."""
    try:
        process = await asyncio.create_subprocess_exec(*words, cwd=folder, env=environ)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be started in {folder}: {error.strerror}") from error
    try:
        code = await process.wait()
        return code if code >= 0 else 128 - code, False
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _COMMAND_SECONDS)
        with suppress(ProcessLookupError):
            process.kill()
        return ENDING.code, True


def _show_answer(answer: Message) -> None:
    """Print its text and its calls: the values of their arguments, and of ``finish`` its message."""
    lines = [answer.content or ""]
    for call in answer.tool_calls:
        given = parse_object(call.arguments.encode())
        what = call.arguments if given is None else " ".join(map(str, given.values()))
        lines.append(what if call.name == "finish" else f"[{call.name}: {one_line(what, _LONGEST)}]")
    for line in filter(None, lines):
        _show(line)


def _show(line: str) -> None:
    print(visible(line), flush=True)
