"""The command line, ``openhands-rl``. One module a command; only the one that is run is imported.

examples:
  openhands-rl demo --tiny
  openhands-rl serve --model ./SmolLM2-135M-Instruct --port 8100
  openhands-rl evaluate webshop --agent RLAgent --model policy-v000007 --base-model SmolLM2-135M-Instruct \\
      --base-url http://127.0.0.1:8100/v1 --limit 50
  openhands-rl list ~/.openhands/rl_trajectories --sort reward --desc
  openhands-rl train ~/.openhands/rl_trajectories --model ./model --adapters ./adapters --algorithm grpo --dry-run
  openhands-rl loop webshop --config config.toml --model ./SmolLM2-135M-Instruct --demonstrations 64

`openhands-rl COMMAND --help` explains the options of a command and has more examples.

Ctrl-C and `kill` end a command within seconds and say how to go on (exit code 130 or 143; of a server 0); a second
signal ends it at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any, NoReturn

from openhands_rl_plugin.cli.options import finite, whole
from openhands_rl_plugin.cli.terminal import ENDING, PATIENCE, sayable
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import DEBUG, ConfigError, RLError, UsageError, describe

COMMANDS: Mapping[str, str] = {
    "adapters": "list the versions of an adapter, publish one, or roll back",
    "chat": "talk to a served policy in the terminal, with tools",
    "config": "check a configuration file and print the effective settings",
    "doctor": "check the installation, or find out why turns do not extend each other",
    "evaluate": "roll out an agent over a suite of tasks, grade the episodes, report and compare runs",
    "export": "write stored trajectories in a format that other tools read",
    "gateway": "record what an agent and a model server exchange; only the agent's base_url changes",
    "grade": "grade patches on SWE-bench, SWE-Gym or your own instances",
    "import": "store trajectories that other tools recorded",
    "list": "list stored episodes, or their statistics by run, version, task, ...",
    "loop": "roll out, train and publish in turn, over an environment or a suite of tasks",
    "rollout": "play one episode against an endpoint, for a trainer: reward, token ids, logprobs",
    "run": "let the agent work on a task in a folder, or run another agent's command, and record it",
    "score": "score stored episodes with a reward, a verifier, what people labelled, or by hand; ask for labels",
    "serve": "serve a model and its LoRA adapters, or a policy with its tools, over an OpenAI-compatible API",
    "show": "show a stored episode: its messages, with rewards, versions and token counts",
    "tasks": "make tasks from real packages, check their quality, list them",
    "train": "train an adapter on stored episodes",
}
"""Command -> what it does. Other packages add theirs by the entry points ``openhands_rl_plugin.commands``, which name
modules whose docstrings say what they do after a colon.

A command's module has ``add_arguments(parser)`` and ``run(args)``, which gives the exit code and may be a coroutine.
``--help`` shows its docstring but for the first line. It may have ``RESUME`` (how to go on after a signal),
``PATIENCE`` (seconds to clean up in then) and ``OWN_INTERRUPT`` (Ctrl-C does not end it).
"""

_GROUPS = {
    "record": "run gateway import export rollout",
    "judge": "score",
    "train": "train loop adapters serve chat",
    "evaluate": "evaluate grade tasks",
    "look": "list show doctor config",
}
_MODULES = {"import": "cli.import_", "list": "cli.list_"}
FAILED, WRONG_USAGE, BROKEN_PIPE = 1, 2, 141


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of an option."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = (
            action.default not in (None, False, "", argparse.SUPPRESS) and action.default != [] and action.default != {}
        )
        return text if not shown or "(default" in text else f"{text} (default: %(default)s)".lstrip()


class _Parser(argparse.ArgumentParser):
    """Names the nearest option for an unknown one. Numbers are finite, and whole ones have at most 63 bits."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, **settings)
        self.register("type", int, whole)
        self.register("type", float, finite)

    def parse_known_args(self, *args: Any, **more: Any) -> Any:
        known, unknown = super().parse_known_args(*args, **more)
        for word in unknown:
            options = [option for action in self._actions for option in action.option_strings]
            if word.startswith("--") and (nearest := get_close_matches(word.partition("=")[0], options, n=1)):
                self.error(f"unknown option {word}; did you mean {nearest[0]}?")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"error: {sayable(message)}; see `{self.prog} --help`\n")


def program() -> int:
    """``main`` as a program of its own, which decides what signals do."""
    ENDING.install()
    try:
        ENDING.left_with = main()
    except KeyboardInterrupt:  # before or after the command itself
        ENDING.left_with = _ended()
    return ENDING.left_with


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 143 after
    ``kill`` (SIGTERM).
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    ENDING.begin()
    name = next((word for word in words if not word.startswith("-")), None)
    known = name in COMMANDS or (name is not None and name in registry.names("commands"))
    if name is not None and not known and not {"-h", "--help", "--version"} & set(words):
        return _fail(f"error: {_unknown(name)}", WRONG_USAGE)
    try:
        command = module_of(name) if name and known else None
        args = _parser(name, command).parse_args(words)
        args.words = words
    except KeyboardInterrupt:
        return _ended()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED
    except ConfigError as error:
        return _fail(f"error: {error}", FAILED)
    assert command is not None, "the parser requires a command"
    return _run(command, args)


def _unknown(name: str) -> str:
    nearest = get_close_matches(name, [*COMMANDS, *registry.names("commands")], n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown command {name!r}; {hint}`openhands-rl --help` lists the commands"


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one command, which is imported."""
    return _parser(command, module_of(command))


def module_of(command: str) -> ModuleType:
    """The module of a command, imported. Raises ``ConfigError``."""
    if command in COMMANDS:
        return import_module(f"openhands_rl_plugin.{_MODULES.get(command, f'cli.{command}')}")
    return registry.find("commands", command)


def commands() -> dict[str, str]:
    """All commands, sorted, with what they do. A command of another package that cannot be imported says so."""
    found = dict(COMMANDS)
    for name in registry.names("commands"):
        try:
            text = registry.find("commands", name).__doc__ or ""
            found[name] = text.partition(": ")[2].partition("\n")[0].rstrip(".")
        except ConfigError as error:
            found[name] = f"not installed ({error})"
    return dict(sorted(found.items()))


def _run(command: ModuleType, args: argparse.Namespace) -> int:
    own = hasattr(command, "OWN_INTERRUPT")
    ENDING.begin(getattr(command, "RESUME", ""), getattr(command, "PATIENCE", PATIENCE), own_interrupt=own)
    try:
        code = command.run(args)
        if isinstance(code, Coroutine):
            code = ENDING.run(code)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _ended()
    except BrokenPipeError:
        # Whoever read what was printed (``head``, say) has seen enough; Python would try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RLError as error:
        code = WRONG_USAGE if isinstance(error, UsageError) else FAILED
        return _fail("\n".join(f"error: {line}" for line in str(error).splitlines()), code)
    except Exception as error:
        if os.environ.get(DEBUG):
            print(sayable(traceback.format_exc()), file=sys.stderr)
        return _fail(f"error: {describe(error)} (set {DEBUG}=1 to see where)", FAILED)


def _parser(name: str | None, command: ModuleType | None) -> argparse.ArgumentParser:
    """All commands; only the one that is run, ``name``, has its arguments."""
    parser = _Parser(
        prog="openhands-rl",
        description="Reinforcement learning for OpenHands agents.\n" + ("" if name else _listed()),
        epilog=_after_first_line(__doc__),
    )
    parser.add_argument("--version", action="version", version=version("openhands_rl_plugin"))
    listed = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = commands() if name is None or name not in COMMANDS else COMMANDS
    for each, text in known.items():
        epilog = _after_first_line(command.__doc__) if command else None
        subparser = listed.add_parser(each, description=text, epilog=epilog)
        if each == name and command is not None:
            command.add_arguments(subparser)
    return parser


def _listed() -> str:
    """All commands in groups, within 80 columns."""
    known, lines = commands(), list[str]()
    groups = {group: names.split() for group, names in _GROUPS.items()}
    groups["more"] = [name for name in known if not any(name in names for names in groups.values())]
    for group, names in groups.items():
        lines.append(f"\n{group}:")
        for name in names:
            lines += textwrap.wrap(known[name], 80, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)
    return "\n".join(lines)


def _after_first_line(docstring: str | None) -> str:
    return (docstring or "").partition("\n\n")[2]


def _ended() -> int:
    ENDING.say()
    return ENDING.code


def _fail(message: str, code: int) -> int:
    print(sayable(message), file=sys.stderr)
    return code
