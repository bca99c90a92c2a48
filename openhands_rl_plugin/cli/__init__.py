"""The command line, ``openhands-rl``. One module a command; only the one that is run is imported.

examples:
  openhands-rl demo --tiny
  openhands-rl serve --model ./SmolLM2-135M-Instruct --port 8100
  openhands-rl evaluate webshop --agent RLAgent --model policy-v000007 --base-model SmolLM2-135M-Instruct \\
      --base-url http://127.0.0.1:8100/v1 --limit 50
  openhands-rl list ~/.openhands/rl_trajectories --sort reward --desc
  openhands-rl train ~/.openhands/rl_trajectories --model ./model --adapters ./adapters --algorithm grpo --dry-run
  openhands-rl loop webshop --config config.toml --model ./SmolLM2-135M-Instruct --set loop.demonstrations=64

`openhands-rl COMMAND --help` explains the options of a command and has more examples.

Ctrl-C and `kill` end a command within seconds and say how to go on (exit code 130 or 143; of a server 0); a second
signal ends it at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from openhands_rl_plugin.cli.terminal import ENDING, PATIENCE, sayable, silence_libraries
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import DEBUG, ConfigError, RLError, UsageError, describe, unknown_name

GROUPS = {
    "record": ("run", "gateway", "import", "export"),
    "judge": ("score",),
    "train": ("train", "loop", "adapters", "serve", "chat"),
    "evaluate": ("evaluate", "grade", "tasks"),
    "look": ("list", "show", "doctor"),
}
COMMANDS = tuple(name for group in GROUPS.values() for name in group)
"""Other packages add theirs by the entry points ``openhands_rl_plugin.commands``, which name modules.

A command's module has ``add_arguments(parser)`` and ``run(args)``, which gives the exit code and may be a coroutine.
Its docstring says what it does, in its first line after a colon; ``--help`` shows the rest. It may have ``RESUME`` (how
to go on after a signal) and ``PATIENCE`` (seconds to clean up in then).
"""

_FILES = {"import": "import_", "list": "list_"}
FAILED, WRONG_USAGE, BROKEN_PIPE = 1, 2, 141


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of an option."""

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default and action.default != argparse.SUPPRESS and "(default" not in (action.help or "")
        return f"{action.help or ''}{' (default: %(default)s)' if shown else ''}".lstrip()


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"error: {sayable(message)}; see `{self.prog} --help`\n")


def program(run: Callable[[], int] | None = None) -> int:
    """``main``, or ``run`` in its place, as a program that decides what signals do, and what libraries print."""
    ENDING.install()
    if sys.argv[1:2] != ["run"]:  # whose command has this process's environment
        silence_libraries(offline=False)
    try:
        return (run or main)()
    except KeyboardInterrupt:  # before or after the command itself
        return ENDING.say()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 143 after
    ``kill`` (SIGTERM).
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if words[0] in ("-h", "--help", "--version"):
        return ended(lambda: print(version("openhands_rl_plugin") if words[0] == "--version" else _overview()))
    return ended(lambda: run_command(module_of(words[0]), parser_of(words[0]), words[1:]))


def module_of(command: str) -> ModuleType:
    """The module of a command, imported. Raises ``ConfigError``, of which ``UsageError`` for an unknown one."""
    if command in COMMANDS:
        return import_module(f"{__name__}.{_FILES.get(command, command)}")
    if command not in (others := registry.names("commands")):
        raise UsageError(unknown_name("command", command, [*COMMANDS, *others]))
    return registry.find("commands", command)


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one command, which is imported."""
    module = module_of(command)
    first, _, rest = (module.__doc__ or "").partition("\n\n")
    parser = Parser(prog=f"openhands-rl {command}", description=first.partition(": ")[2], epilog=rest)
    module.add_arguments(parser)
    return parser


def commands() -> dict[str, str]:
    """All commands, with what they do. Those of other packages are imported; one that cannot be says so."""
    found: dict[str, str] = {}
    for name in COMMANDS:
        with Path(__file__).with_name(f"{_FILES.get(name, name)}.py").open(encoding="utf-8") as file:
            found[name] = file.readline()
    for name in registry.names("commands"):
        try:
            found[name] = registry.find("commands", name).__doc__ or ""
        except ConfigError as error:
            found[name] = f": not installed ({error})"
    return {name: text.partition(": ")[2].partition("\n")[0].rstrip(".") for name, text in found.items()}


def run_command(command: ModuleType, parser: argparse.ArgumentParser, words: Sequence[str] | None) -> int:
    """Run ``command`` with its ``words`` (default: those of the process), and return what its ``run`` does."""
    ENDING.advice, ENDING.patience = getattr(command, "RESUME", ""), getattr(command, "PATIENCE", PATIENCE)
    args = parser.parse_args(words)
    args.typed = sayable(shlex.join([*parser.prog.split(), *(words or ())]))  # as runs keep it
    code = command.run(args)
    return ENDING.run(code) if isinstance(code, Coroutine) else code


def ended(work: Callable[[], int | None]) -> int:
    """The exit code of ``work``, whose errors are printed as one line each."""
    try:
        code = work()
        sys.stdout.flush()
        return code or 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich has closed the output
            return BROKEN_PIPE
        return error.code if isinstance(error.code, int) else FAILED
    except KeyboardInterrupt:
        return ENDING.say()
    except BrokenPipeError:
        # Whoever read what was printed (``head``, say) has seen enough; Python would try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RLError as error:
        print(sayable("\n".join(f"error: {line}" for line in str(error).splitlines())), file=sys.stderr)
        return WRONG_USAGE if isinstance(error, UsageError) else FAILED
    except Exception as error:
        if os.environ.get(DEBUG):
            print(sayable(traceback.format_exc()), file=sys.stderr)
        print(sayable(f"error: {describe(error)} (set {DEBUG}=1 to see where)"), file=sys.stderr)
        return FAILED


def _overview() -> str:
    """All commands in groups, within 80 columns, and examples."""
    known = commands()
    lines = ["usage: openhands-rl COMMAND ...\n\nReinforcement learning for OpenHands agents."]
    for group, names in {**GROUPS, "more": [each for each in known if each not in COMMANDS]}.items():
        lines.append(f"\n{group}:")
        for name in names:
            lines += textwrap.wrap(known[name], 80, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)
    return "\n".join(lines) + "\n\n" + (__doc__ or "").partition("\n\n")[2]
