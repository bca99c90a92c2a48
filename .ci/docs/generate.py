"""What pages of docs/ have from the source: cog runs this (``make reference`` writes, ``make lint`` checks).

In a page:  <!-- [[[cog generate.cli() ]]] --> ... <!-- [[[end]]] -->
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

with suppress(ImportError):  # check.py only asks for the names
    import cog

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "openhands_rl_plugin"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


# --- the command line


SHARED_BY = 2


def cli() -> None:
    """The options that several commands share, then a section for each command, with its own options and examples."""
    from openhands_rl_plugin.cli import COMMANDS, commands, parser_of

    parsers: list[tuple[str, argparse.ArgumentParser, str, int]] = []
    texts = commands()
    for name in sorted(COMMANDS):
        parsers += _nested(f"openhands-rl {name}", parser_of(name), texts[name], 2)
    counts = Counter(row for _, parser, _, _ in parsers for row in set(_rows(parser)) if row[0].startswith("`--"))
    shared = {row for row, count in counts.items() if count >= SHARED_BY}
    cog.outl("\n## Options of several commands\n\n| argument | meaning |\n|---|---|")
    for named, meaning in sorted(shared):
        cog.outl(f"| {named} | {meaning} |")
    for name, parser, text, level in parsers:
        _command(name, parser, text, level, shared)
    cog.outl("\n## Commands with pages of their own\n\n| command | what it does |\n|---|---|")
    for name, text in texts.items():
        if name not in COMMANDS:
            cog.outl(f"| `openhands-rl {name}` | {_cell(text)} |")


def _nested(
    name: str, parser: argparse.ArgumentParser, text: str, level: int
) -> list[tuple[str, argparse.ArgumentParser, str, int]]:
    """The command and those below it: name, parser, what it does, level of its heading."""
    found = [(name, parser, text, level)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for each, below in action.choices.items():
                found += _nested(f"{name} {each}", below, helps.get(each, ""), level + 1)
    return found


_OF_SECTION = re.compile(r"The keys of \[([\w.]+)\]")


def _rows(parser: argparse._ActionsContainer) -> list[tuple[str, str]]:
    """Named arguments with their meanings; of a parser without the keys of settings, which have a page."""
    known = [
        action
        for group in getattr(parser, "_action_groups", [])
        if isinstance(parser, argparse.ArgumentParser) and _OF_SECTION.match(group.description or "")
        for action in group._group_actions
    ]
    found = getattr(parser, "_group_actions", None) or parser._actions
    return [(_named(each), _cell(_meaning(each))) for each in found if not _left_out(each) and each not in known]


def _command(
    name: str, parser: argparse.ArgumentParser, text: str, level: int, shared: Collection[tuple[str, str]]
) -> None:
    cog.outl(f"\n{'#' * level} {name}\n\n{_cell(text[:1].upper() + text[1:])}.")
    rows = _rows(parser)
    for group in parser._action_groups:
        if found := _OF_SECTION.match(group.description or ""):
            first = _rows(group)[0][0].split()[0].strip("`")
            link = f"[`[{found[1]}]`](configuration.md#{found[1].replace('.', '')})"
            cog.outl(f"\nEach key of {link} is an option, such as `{first}`.")
    if own := [row for row in rows if row not in shared]:
        cog.outl("\n| argument | meaning |\n|---|---|")
    for named, meaning in own:
        cog.outl(f"| {named} | {meaning} |")
    filters = [group for group in parser._action_groups if group.title == "filters"]
    known = {_named(action) for group in filters for action in group._group_actions}
    if others := [
        named.split()[0].strip("`,") for named, meaning in rows if (named, meaning) in shared and named not in known
    ] + (["filters"] if filters else []):
        also = ", ".join(f"`{each}`" if each.startswith("-") else each for each in others)
        cog.outl(f"\n[Also](#options-of-several-commands) {also}.")
    if parser.epilog and level == 2:
        # The rest of the help is for the terminal: here pages say it.
        (part,) = [part for part in parser.epilog.strip("\n").split("\n\n") if part.startswith("examples")]
        examples = "\n".join(re.findall(r"^  (?:.*\\\n)*.*", part, re.MULTILINE)[:3])
        cog.outl(f"\n```text\n{examples}\n```")


def _left_out(action: argparse.Action) -> bool:
    return action.help == argparse.SUPPRESS or isinstance(
        action, (argparse._HelpAction, argparse._SubParsersAction, argparse._VersionAction)
    )


def _named(action: argparse.Action) -> str:
    value = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    if isinstance(value, tuple):
        value = " ".join(value)
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    value = value.replace("|", "\\|")
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(action.option_strings)
    return f"`{names}`" if action.nargs == 0 else f"`{names} {value}`"


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    default = action.default
    if default in (None, False, "", argparse.SUPPRESS) or default == [] or default == {} or "(default" in text:
        return text.replace("%(default)s", str(default))
    home = str(Path.home())
    return f"{text} (default: {str(default).replace(home, '~')})"


# --- the configuration


def configuration() -> None:
    """A table for each section of ``config.toml.example``, with its comments."""
    text = (PACKAGE.parent / "config.toml.example").read_text(encoding="utf-8")
    for section in re.split(r"^(?=\[)", text, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        name, _, about = head.partition("]")
        cog.outl(f"\n## {name}]\n")
        lines = [about.strip(), *body.splitlines()]
        notes, rows = _entries(lines)
        if notes:
            cog.outl(" ".join(notes) + "\n")
        cog.outl("| key | value | meaning |\n|---|---|---|")
        for key, value, meaning in rows:
            cog.outl(f"| `{key}` | `{value.replace('|', chr(92) + '|')}` | {_cell(meaning)} |")


_ENTRY = re.compile(r"(?P<off># )?(?P<key>\w+) = (?P<value>[^#]*?)\s*(?:#\s?(?P<meaning>.*))?")


def _entries(lines: list[str]) -> tuple[list[str], list[tuple[str, str, str]]]:
    notes: list[str] = []
    rows: list[tuple[str, str, str]] = []
    for line in lines:
        if found := _ENTRY.fullmatch(line):
            rows.append((found["key"], found["value"].strip(), found["meaning"] or ""))
        elif (text := line.strip().removeprefix("#").strip()) and line.startswith(" ") and rows:
            key, value, meaning = rows[-1]
            rows[-1] = (key, value, f"{meaning} {text}")
        elif text:
            notes.append(text.replace("<", "&lt;"))
    return notes, rows


# --- the Python API

_GROUPS = {
    "Agent": ["RLAgent", "RLAgentConfig", "AgentRuntime", "AgentSession", "demo_model"],
    "Values": [
        "Task", "Message", "Observation", "Trajectory", "Score", "PolicyRef", "SamplingParams", "Limits",
        "EpisodeRequest", "EpisodeTree", "TrajectoryFilter", "Frozen",
    ],
    "Settings": ["RLSettings", "load_settings"],
    "Environments and tools": ["BaseEnvClient", "WebEnvClient", "ToolBase", "ToolEnvironment"],
    "Strategies": ["StandardReActStrategy", "ToTStrategy", "MCTSStrategy"],
    "Engines, adapters, templates": ["OpenAIEngine", "AdapterStore", "make_template"],
    "Rollouts for trainers": ["play", "PlayOptions"],
    "Stores": ["FileTrajectoryStorage", "MongoDBTrajectoryStorage"],
    "Errors": ["RLError", "ConfigError"],
}  # fmt: skip


def exports() -> dict[str, str]:
    """Public name -> its full path."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_EXPORTS"
    )
    given = ast.literal_eval(found)
    parts = {name: target.partition(":") for name, target in given.items()}
    return {name: f"openhands_rl_plugin.{module}.{at or name}" for name, (module, _, at) in parts.items()}


def api() -> None:
    """The public names by topic, for mkdocstrings. A name without a topic ends the build."""
    paths = exports()
    grouped = [name for names in _GROUPS.values() for name in names]
    if odd := set(paths) ^ set(grouped):
        raise SystemExit(f".ci/docs/generate.py: _GROUPS differs from openhands_rl_plugin.__all__ by {sorted(odd)}")
    for title, names in _GROUPS.items():
        cog.outl(f"\n## {title}")
        done: set[str] = set()
        for name in names:
            if paths[name] in done or name == "RLAgentConfig":
                continue
            done.add(paths[name])
            cog.outl(f"\n::: {paths[name]}")
    cog.outl("\n`RLAgentConfig` is another name of `RLSettings`.")


# --- causes of drift


def causes() -> None:
    """Cause and remedy, from ``trajectories/drift.py``."""
    from openhands_rl_plugin.trajectories.drift import SETTINGS

    cog.outl("\n| cause | cure |\n|---|---|")
    for cause, setting in SETTINGS.items():
        cog.outl(f"| {cause} | {_cell(setting)} |")


# --- figures


def figures(header: str) -> None:
    """The first table of ``evaluation/performance/README.md`` with this header."""
    text = (ROOT / "evaluation/performance/README.md").read_text(encoding="utf-8")
    cog.outl("\n" + text[text.index(header) :].partition("\n\n")[0])


# --- where things are


def questions() -> None:
    """AGENTS.md's table of questions."""
    text = (PACKAGE / "AGENTS.md").read_text(encoding="utf-8")
    cog.outl("\n| question | file | name |\n|---|---|---|")
    for row in re.findall(r"^\| [^|]+\? \| `[^`]+` \| `[^`]+` \|$", text, re.MULTILINE):
        cog.outl(row)


def pages() -> Iterator[tuple[str, str, str]]:
    """Path, title and first sentence of each page, in the order of the navigation."""
    order = re.findall(r'"([\w/-]+\.md)"', (ROOT / ".zensical.toml").read_text(encoding="utf-8"))
    for path in order:
        text = (ROOT / "docs" / path).read_text(encoding="utf-8")
        title = re.findall(r"^# (.*)$", text, re.MULTILINE)[0]
        body = re.sub(r"<!--.*?-->", "", text.partition(f"# {title}\n")[2], flags=re.DOTALL)
        first = next(part for part in re.split(r"\n\s*\n", body.strip()) if part[:1].isalpha() or part[:1] in "`*[")
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(first.split()))
        yield path, title, re.split(r"(?<=[.:])\s", plain)[0].rstrip(":")


def llms() -> None:
    """The list of pages that language models read."""
    for path, title, first in pages():
        cog.outl(f"- [{title}]({path}): {first}")
