"""The scripted oracle: it looks at the file, runs the tests, edits, runs them again, and errs now and then on the way.

Its answers are text as OpenHands writes calls for a model without tool calling, with the host's names of its tools.
They follow from the conversation and a seed, so that the same episodes can be played in any process.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from openhands_rl_plugin.config.host import ToolNames
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.repair.kinds import bugs_in
from openhands_rl_plugin.evals.tasks.repair.rows import DIRECTORY, RUN_TESTS, RepairSpec, spec_of

ORACLE = "repair-oracle"
WRONG_FIX, WRONG_TEXT = 0.3, 0.15
"""Shares of edits that do not repair, and of those whose ``old_str`` is not in the file."""
MOST_ERRORS = 3
_NAME = re.compile(r"\A<function=(\w+)>\n")
_PARAMETER = re.compile(r"^<parameter=(\w+)>(.*?)</parameter>\n(?=<)", re.DOTALL | re.MULTILINE)
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class Replacement(Frozen):
    """Lines of a file that are found once in it, and those that take their place."""

    old: str
    new: str


class OracleCall(NamedTuple):
    """An answer. ``errs``: an edit that does not repair, which is there for what follows it."""

    text: str
    errs: bool = False


class RepairOracle:
    """Answers for the tasks of ``instances``: found by their statements, and those with the same one by the file that
    was looked at. ``tools``: those of the host that it plays in."""

    def __init__(self, instances: Sequence[Instance], tools: ToolNames, seed: int = 0) -> None:
        self._tools = tools
        self._seed = seed
        self._instances: dict[str, list[Instance]] = {}
        for each in instances:
            self._instances.setdefault(each.problem_statement, []).append(each)

    def answer(self, conversation: Sequence[Mapping[str, str]]) -> str:
        """The next answer of a conversation, messages with ``role`` and ``content``. Raises ``ConfigError``."""
        told = next((each["content"] for each in conversation if each["role"] == "user"), "")
        same = next((each for text, each in self._instances.items() if text in told), None)
        if same is None:
            raise ConfigError("the oracle does not know the task of this conversation")
        seen = "\n".join(each["content"] for each in conversation)
        calls = oracle_calls(next((each for each in same if _is_seen(each, seen)), same[0]), self._tools, self._seed)
        return calls[min(sum(each["role"] == "assistant" for each in conversation), len(calls) - 1)]


def _is_seen(instance: Instance, text: str) -> bool:
    """Whether every line of the file with the bug is in the text."""
    spec = spec_of(instance)
    return all(line in text for line in spec.files[spec.path].splitlines())


def oracle_calls(instance: Instance, tools: ToolNames, seed: int) -> list[str]:
    """The answers of an episode, in their order."""
    return [call.text for call in oracle_plan(instance, tools, seed)]


def oracle_plan(instance: Instance, tools: ToolNames, seed: int) -> list[OracleCall]:
    """The answers of an episode, in their order, and which of them err."""
    spec = spec_of(instance)
    choice = random.Random(f"{seed} {instance.instance_id}")
    path = f"/workspace/{DIRECTORY}/{spec.path}"
    wrong, right = spec.files[spec.path], fixed_text(instance)
    look = _call(tools.editor, command="view", path=path, security_risk="LOW")
    test = _call(tools.shell, command=f"python3 {RUN_TESTS}", security_risk="LOW")
    calls = [*_search(instance, tools), look, test]
    plan = [OracleCall(text) for text in calls]
    for _ in range(MOST_ERRORS):
        error = choice.random()
        if error < WRONG_FIX and (other := _other_fix(spec, wrong, right, choice)) is not None:
            plan += [OracleCall(edit_call(tools, path, replacement(wrong, other)), errs=True), OracleCall(test)]
            wrong = other
        elif WRONG_FIX <= error < WRONG_FIX + WRONG_TEXT:
            edit = replacement(wrong, right)
            misread = Replacement(old=_misread(edit.old, wrong, choice), new=edit.new)
            plan.append(OracleCall(edit_call(tools, path, misread), errs=True))
        else:
            break
    end = [edit_call(tools, path, replacement(wrong, right)), test, _call("finish", message="The tests pass.")]
    return [*plan, *map(OracleCall, end)]


def parsed_call(text: str) -> tuple[str, dict[str, str]]:
    """The name and the arguments of a call that ``oracle_calls`` wrote."""
    return _NAME.findall(text)[0], dict(_PARAMETER.findall(text))


def fixed_text(instance: Instance) -> str:
    """The module without the bug: the row's patch, applied. Raises ``ConfigError`` for a patch of another text."""
    spec = spec_of(instance)
    old = spec.files[spec.path].splitlines(keepends=True)
    new: list[str] = []
    at = 0
    for line in instance.patch.splitlines(keepends=True)[3:]:
        if found := _HUNK.match(line):
            start = int(found[1]) - 1
            new += old[at:start]
            at = start
        elif line[0] == "+":
            new.append(line[1:])
        elif old[at : at + 1] != [line[1:]]:
            raise ConfigError(f"{instance.instance_id}: its patch is not for its files")
        else:
            new += old[at : at + 1] if line[0] == " " else []
            at += 1
    return "".join([*new, *old[at:]])


def replacement(old: str, new: str) -> Replacement:
    """The smallest run of whole lines that makes ``new`` of ``old`` and is found once."""
    before, after = old.splitlines(), new.splitlines()
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [each for each in codes if each[0] != "equal"]
    first, last = changed[0][1], changed[-1][2]
    tail, end = len(before) - last, changed[-1][4]
    start = changed[0][3]
    while True:
        text = "\n".join(before[first:last])
        if text.strip() and old.count(text) == 1:
            return Replacement(old=text, new="\n".join(after[start:end]))
        if first > 0:
            first, start = first - 1, start - 1
        elif tail > 0:
            last, end, tail = last + 1, end + 1, tail - 1
        else:
            return Replacement(old=old.rstrip("\n"), new=new.rstrip("\n"))


def _search(instance: Instance, tools: ToolNames) -> Iterator[str]:
    """What has to be found out first where the statement does not name the file."""
    if spec_of(instance).path not in instance.problem_statement:
        yield _call(tools.shell, command=f"cat {instance.fail_to_pass[0].partition('::')[0]}", security_risk="LOW")


def _other_fix(spec: RepairSpec, wrong: str, right: str, choice: random.Random) -> str | None:
    """A text that differs from ``right`` where ``wrong`` does, in another way; ``None`` where there is none."""
    place = _changed_lines(right, wrong)
    others = sorted(text for _, text in bugs_in(right, spec.function) if text != wrong)
    near = [text for text in others if _changed_lines(right, text) == place and replacement(wrong, text).new.strip()]
    return choice.choice(near) if near else None


def _changed_lines(old: str, new: str) -> tuple[int, int]:
    codes = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    changed = [each for each in codes if each[0] != "equal"]
    return changed[0][1], changed[-1][2]


def _misread(text: str, file: str, choice: random.Random) -> str:
    """The text with one thing read wrongly (a quote, the indentation, a bracket), so that it is not in the file, not
    even without the white space around it: OpenHands V1 looks for that, too."""
    deeper = text.replace("\n", "\n ", 1)
    options = [text.replace("'", '"'), deeper, text.replace("(", "", 1), text.replace("_", "", 1), f"{text};"]
    return choice.choice([each for each in options if each.strip() not in file])


def edit_call(tools: ToolNames, path: str, edit: Replacement) -> str:
    """An edit of a file."""
    changed = {"old_str": edit.old, "new_str": edit.new}
    return _call(tools.editor, command="str_replace", path=path, **changed, security_risk="MEDIUM")


def _call(name: str, **arguments: str) -> str:
    lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{lines}</function>"
