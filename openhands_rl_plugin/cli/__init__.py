"""The command line, ``openhands-rl``. One module a command; only the one that is run is imported."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from openhands_rl_plugin.core.errors import RLError, describe

COMMANDS: Mapping[str, str] = {
    "adapters": "openhands_rl_plugin.cli.adapters",
    "agent": "openhands_rl_plugin.cli.agent",
    "chat": "openhands_rl_plugin.cli.chat",
    "compare": "openhands_rl_plugin.cli.compare",
    "config": "openhands_rl_plugin.cli.config",
    "demo": "openhands_rl_plugin.cli.demo",
    "doctor": "openhands_rl_plugin.cli.doctor",
    "env": "openhands_rl_plugin.cli.env",
    "evaluate": "openhands_rl_plugin.cli.evaluate",
    "export": "openhands_rl_plugin.cli.export",
    "gateway": "openhands_rl_plugin.cli.gateway",
    "grade": "openhands_rl_plugin.cli.grade",
    "import": "openhands_rl_plugin.cli.import_",
    "list": "openhands_rl_plugin.cli.list_",
    "loop": "openhands_rl_plugin.cli.loop",
    "report": "openhands_rl_plugin.cli.report",
    "score": "openhands_rl_plugin.cli.score",
    "serve": "openhands_rl_plugin.cli.serve",
    "show": "openhands_rl_plugin.cli.show",
    "stats": "openhands_rl_plugin.cli.stats",
    "tasks": "openhands_rl_plugin.cli.tasks",
    "train": "openhands_rl_plugin.cli.train.train",
}
"""Command -> module with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``; it may have ``EPILOG`` (its
examples) and ``RESUME`` (what to do after Ctrl-C). Its own imports must be light."""

DEBUG = "OPENHANDS_RL_DEBUG"
FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141

_EPILOG = """examples:
  openhands-rl demo --tiny
  openhands-rl config check config.toml
  openhands-rl env webshop --port 8000
  openhands-rl serve --model ./SmolLM2-135M-Instruct --port 8100
  openhands-rl chat --base-url http://127.0.0.1:8100/v1 --model policy-v000007 --tools think final
  openhands-rl agent --base-url http://127.0.0.1:8100/v1 --model policy-v000007 --tools think final
  openhands-rl gateway --upstream http://127.0.0.1:8100/v1 --store ./trajectories
  openhands-rl list ~/.openhands/rl_trajectories --sort reward --desc
  openhands-rl show ~/.openhands/rl_trajectories 3f2a
  openhands-rl stats ~/.openhands/rl_trajectories --by version
  openhands-rl doctor
  openhands-rl doctor drift ~/.openhands/rl_trajectories
  openhands-rl evaluate swe-local --llm eval --config config.toml --workers 4
  openhands-rl grade preds.jsonl --instances rows.jsonl --out ./graded
  openhands-rl compare evaluation_outputs/before evaluation_outputs/after
  openhands-rl export ~/.openhands/rl_trajectories --format sft-text --out sft.jsonl --resolved
  openhands-rl train ~/.openhands/rl_trajectories --model ./model --adapters ./adapters --algorithm grpo --dry-run
  openhands-rl loop webshop --config config.toml --model ./SmolLM2-135M-Instruct --demonstrations 64
  openhands-rl score ~/.openhands/rl_trajectories --verifier ./adapters/verifier-v000001
  openhands-rl adapters list --adapters ./adapters
  openhands-rl import output.jsonl --format output-jsonl --into ~/.openhands/rl_trajectories
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    commands = {each: import_module(module) for each, module in COMMANDS.items() if name in (each, None)}
    try:
        args = _parser(commands).parse_args(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED
    return _run(commands[args.command], args)


def _run(command: ModuleType, args: argparse.Namespace) -> int:
    try:
        code = command.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _say("interrupted" + (f"; {command.RESUME}" if hasattr(command, "RESUME") else ""), INTERRUPTED)
    except BrokenPipeError:
        # Whoever read what was printed (``head``, say) has seen enough; Python would try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RLError as error:
        return _say("\n".join(f"error: {line}" for line in str(error).splitlines()), FAILED)
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return _say(f"error: {describe(error)} (set {DEBUG}=1 to see where)", FAILED)


def _parser(commands: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """All commands, of which those in ``commands`` have their arguments."""
    parser = argparse.ArgumentParser(
        prog="openhands-rl",
        description="Reinforcement learning for OpenHands agents.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version("openhands_rl_plugin"))
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = commands.get(name)
        subparser = chosen.add_parser(
            name,
            help=module and module.HELP,
            description=module and module.HELP,
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(subparser)
    return parser


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
