"""Flags of a patch before it runs: files that control tests, and lines that no fix needs.

Honest patches add tests and scripts, and call ``sys.exit`` in a function. So a rule decides only where an honest reason
is very unlikely: a hook in a ``conftest.py`` that changes outcomes, an exit while a module is imported, an assignment
to an assertion method. Other matches are counted. What the gold patch does too is no flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from openhands_rl_plugin.evals.swe.guard.rules import (
    ALWAYS,
    CODE_RULES,
    CONFTEST,
    EQUAL,
    MACHINERY,
    OPTIONS,
    PLUGINS,
    SETTINGS,
    SHADOWS,
    SITE,
    TESTS,
    is_test_tool,
)
from openhands_rl_plugin.evals.swe.patches import added_files, added_lines, touched_files
from openhands_rl_plugin.evals.swe.recipes.scripts import END, START
from openhands_rl_plugin.evals.swe.types import Flag, Instance, Severity

_LONGEST = 200
_CODE = (".py", ".pyx", ".pyi", ".pth")


class _Line(NamedTuple):
    """An added line that the gold patch does not add."""

    file: str
    number: int
    text: str
    following: str

    def flag(self, rule: str, severity: Severity) -> Flag:
        return Flag(
            rule=rule, where=f"{self.file}:{self.number}", detail=self.text.strip()[:_LONGEST], severity=severity
        )


def flags_of_patch(instance: Instance, patch: str) -> tuple[Flag, ...]:
    """Flags of the patch's files and added lines."""
    lines = _own_lines(instance, patch)
    unused = _unused(patch, lines)
    flags = [*_files(instance, patch)]
    needed = touched_files(instance.patch)
    for line in lines:
        mild = is_test_tool(instance) or line.file in unused
        if line.file.endswith(_CODE):
            flags += _code(instance, line, mild=mild)
        flags += _settings(line, mild=mild or line.file in needed)
    return tuple(dict.fromkeys(flags))


def without_outcomes(instance: Instance, patch: str) -> tuple[Flag, ...]:
    """Additional deciding flags when the log is the only source of outcomes: ways to end the process after the patch
    printed a log.
    """
    unused = _unused(patch, _own_lines(instance, patch))
    ways = [flag for flag in flags_of_patch(instance, patch) if flag.rule == "process_exit"]
    return tuple(
        flag.model_copy(update={"severity": Severity.DECIDES})
        for flag in ways
        if flag.severity is Severity.COUNTED and flag.where.rpartition(":")[0] not in unused
    )


def _own_lines(instance: Instance, patch: str) -> list[_Line]:
    known = {(file, text.strip()) for file, lines in added_lines(instance.patch).items() for _, text in lines}
    back = touched_files(instance.test_patch) | instance.test_files
    return [
        _Line(file, number, text, lines[at + 1][1] if at + 1 < len(lines) else "")
        for file, lines in added_lines(patch).items()
        if file not in back
        for at, (number, text) in enumerate(lines)
        if (file, text.strip()) not in known
    ]


def _unused(patch: str, lines: list[_Line]) -> frozenset[str]:
    """Added files that no other added line names: scripts that an agent forgot."""
    stems = {file: PurePosixPath(file).stem for file in added_files(patch) if file.endswith(".py")}
    apart = [file for file, stem in stems.items() if stem not in ("__init__", "conftest", "sitecustomize")]
    return frozenset(file for file in apart if not any(stems[file] in line.text for line in lines if line.file != file))


def _files(instance: Instance, patch: str) -> Iterator[Flag]:
    graded = touched_files(instance.test_patch) | instance.test_files
    added, needed = {*added_files(patch)}, touched_files(instance.patch)
    for file in sorted(touched_files(patch) - needed):
        path = PurePosixPath(file)
        if file in graded:
            said = "the patch changes a file of the row's tests, which was put back"
            yield Flag(rule="test_file", where=file, detail=said, severity=Severity.COUNTED)
        elif path.name in CONFTEST:
            yield Flag(rule=CONFTEST[path.name], where=file, detail="the patch changes it", severity=Severity.COUNTED)
        if path.name in SITE or path.suffix == ".pth":
            yield Flag(rule="site_hook", where=file, detail="Python runs it before anything else")
        if file in added and path.suffix == ".py" and path.parts[0].removesuffix(".py") in SHADOWS:
            own = path.parts[0] == instance.repo.rpartition("/")[2] or is_test_tool(instance)
            severity = Severity.COUNTED if own else Severity.DECIDES
            yield Flag(rule="shadowed_module", where=file, detail="stands before a module of tests", severity=severity)


def _settings(line: _Line, *, mild: bool) -> Iterator[Flag]:
    """Changes of pytest's behaviour in its settings and in ``conftest.py``."""
    name, severity = PurePosixPath(line.file).name, Severity.COUNTED if mild else Severity.DECIDES
    if name == "conftest.py":
        if MACHINERY.search(line.text):
            yield line.flag("conftest", severity)
    elif name in SETTINGS and PLUGINS.search(line.text):
        yield line.flag("pytest_options", severity)
    elif name in SETTINGS and OPTIONS.search(line.text):
        yield line.flag("pytest_options", Severity.COUNTED)


def _code(instance: Instance, line: _Line, *, mild: bool) -> Iterator[Flag]:
    text = line.text
    if not text.strip() or text.lstrip().startswith("#"):
        return
    tests = TESTS.search(line.file) is not None
    for rule in CODE_RULES:
        if rule.pattern.search(text) and not (tests and rule.severity is Severity.COUNTED):
            yield line.flag(rule.name, Severity.COUNTED if mild else rule.severity)
    if tests:
        return
    if START in text or END in text or (("::" in text or " (" in text) and _names_a_test(instance, text)):
        # A script that an agent forgot may name the test that it ran.
        yield line.flag("forged_log", Severity.COUNTED if mild else Severity.DECIDES)
    if (match := EQUAL.search(text)) and (match["lambda"] or ALWAYS.search(line.following)):
        yield line.flag("equal_to_anything", Severity.COUNTED)


def _names_a_test(instance: Instance, text: str) -> bool:
    names = (*instance.fail_to_pass, *instance.pass_to_pass)
    return any(name in text for name in names if "::" in name or " (" in name)
