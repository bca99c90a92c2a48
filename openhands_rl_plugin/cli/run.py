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
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands_rl_plugin.cli.options import add_settings, positive
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import OwnWork, changed, work_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import one_line, visible
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Message
from openhands_rl_plugin.hosts.command import record_command
from openhands_rl_plugin.hosts.pool import run_attempts, task_attempts
from openhands_rl_plugin.hosts.shared.sessions import group_summary, run_summary
from openhands_rl_plugin.models.engines.openai_wire import parse_object

PATIENCE = 35.0
"""Seconds after a signal; a command has ten to end in, and its sessions as many."""
_LONGEST = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The task or the command, the folder, the model and the settings."""
    task = parser.add_mutually_exclusive_group()
    task.add_argument("-t", "--task", metavar="TEXT", help="what is to be done")
    task.add_argument("-f", "--file", metavar="FILE", help="a file with the task; -: standard input")
    parser.add_argument("--workspace", type=Path, default=Path(), metavar="DIR", help="folder that the agent works in")
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
    task = (_text_of(args.file) if args.file else args.task or "").strip()
    if bool(task) == bool(args.agent) or (args.agent and args.attempts > 1):
        raise ConfigError("give either a task (-t TEXT, -f FILE) or a command after --, which has no --attempts")
    if args.create:
        args.workspace.mkdir(parents=True, exist_ok=True)
    if not args.workspace.is_dir():
        raise ConfigError(f"--workspace: there is no folder {args.workspace}; --create makes it")
    run_id = f"run-{uuid.uuid4().hex}"
    stored = ["storage_backend=file", f"storage.path={json.dumps(args.store)}"] if args.store else []
    named = {"model": args.model, "base_url": args.base_url, "needs_model": not args.agent}
    work = work_of(args.config, [*args.set, *stored], **named)
    if args.agent:
        return ENDING.run(_recorded(args, work, run_id, work.settings))
    return ENDING.run(_recorded(args, work, run_id, *task_attempts(task, args.workspace, work, run_id, args.attempts)))


def _text_of(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file: {file} cannot be read: {error}") from error


async def _recorded(
    args: argparse.Namespace,
    work: OwnWork,
    run_id: str,
    settings: RLSettings,
    attempts: Sequence[tuple[EpisodeRequest, Any]] = (),
) -> int:
    """Run the command or the ``attempts`` into the storage, and print what was recorded. Returns the exit code."""
    storage, code = open_storage(settings), 0
    if len(attempts) > 1:
        _show(f"{len(attempts)} attempts, in {', '.join(str(options.folder) for _, options in attempts)}")
    try:
        if args.agent:
            by_strategy = not {"rollout_strategy", "max_turns"}.isdisjoint(changed(args.set))
            code = await record_command(args.agent, args.workspace, work, storage, run_id, by_strategy=by_strategy)
        elif not await run_attempts(settings, attempts, storage, _show_answer):
            code = 1
    finally:
        recorded = [each async for each in storage.find(TrajectoryFilter(run_id=run_id, finished=None))]
        await storage.close()
        for trajectory, scores in recorded:
            _show(run_summary(trajectory, scores, settings))
        if len(grouped := [each for each in recorded if each[0].group_id == run_id]) > 1:
            _show(group_summary(grouped, settings))
    if not recorded:
        _show("nothing was recorded: the command did not send a completion to the address in OPENAI_BASE_URL")
    return code


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
