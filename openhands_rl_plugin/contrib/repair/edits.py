"""Edits as commands of ``sed``, which small models write well: what changes of a line, and little else."""

from __future__ import annotations

import difflib
import re

from openhands_rl_plugin.core.types import Frozen

_WORDS = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\w+|\s+|[=!<>]=|\*\*|//|.")
_SPECIAL = re.compile(r"[\\*\[\]^$]")
_DELIMITERS = "/|#,;:@~%!"


class LineEdit(Frozen):
    """The lines ``first`` to ``last`` of a file, counted from 1, and those that take their place."""

    first: int
    last: int
    lines: tuple[str, ...]

    @property
    def is_of_words(self) -> bool:
        """Whether one line takes the place of one: what changes is some of its words."""
        return self.first == self.last and len(self.lines) == 1


def line_edit(old: str, new: str) -> LineEdit:
    """The smallest run of lines of ``old`` that makes ``new`` of it, and at least one: what is only added takes the
    line after it with it, or the last one."""
    before, after = old.splitlines(), new.splitlines()
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [each for each in codes if each[0] != "equal"]
    first, last, start, end = changed[0][1], changed[-1][2], changed[0][3], changed[-1][4]
    if first == last or start == end:
        if last < len(before):
            last, end = last + 1, end + 1
        else:
            first, start = first - 1, start - 1
    return LineEdit(first=first + 1, last=last, lines=tuple(after[start:end]))


def patch_of(path: str, old: str, new: str) -> str:
    """The change of a file as a patch in git's form."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def sed_script(old: str, new: str) -> str:
    """A script of ``sed``, in one line, that makes the text ``new`` of the text ``old``: of one line the words that
    differ, of more the lines."""
    edit = line_edit(old, new)
    place = f"{edit.first}" if edit.first == edit.last else f"{edit.first},{edit.last}"
    if edit.is_of_words:
        found = _substitution(old.splitlines()[edit.first - 1], edit.lines[0])
        if found is not None:
            return f"{place}{found}"
    text = "\\n".join(line.replace("\\", "\\\\") for line in edit.lines)
    return f"{place}c\\{text}"


def _substitution(old: str, new: str) -> str | None:
    """``s/what/with/`` where the first match of ``what`` in the line is the place."""
    before, after = _WORDS.findall(old), _WORDS.findall(new)
    start = _same(before, after)
    rest = min(len(before), len(after)) - start
    end = min(rest, _same(before[::-1], after[::-1]))
    first, last = start, len(before) - end
    # What is only added needs a word to stand beside, and what occurs earlier in the line the words before it.
    while first == last or not _is_first(before, first, last):
        if first == last and last < len(before) and before[last].strip():
            last, end = last + 1, end - 1
        elif first > 0:
            first -= 1
        elif last < len(before):
            last, end = last + 1, end - 1
        else:
            return None
    while before[first].isspace() and last - first > 1 and _is_first(before, first + 1, last) and first < start:
        first += 1
    what, put = "".join(before[first:last]), "".join(after[first : len(after) - end])
    mark = next((each for each in _DELIMITERS if each not in what + put), None)
    if mark is None or not what.strip():
        return None
    return f"s{mark}{_SPECIAL.sub(_escaped, what)}{mark}{re.sub(r'[\\&]', _escaped, put)}{mark}"


def _same(one: list[str], other: list[str]) -> int:
    """How many words they begin with are the same."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), min(len(one), len(other))
    )


def _is_first(words: list[str], first: int, last: int) -> bool:
    """A dot is written as it is, and matches any character."""
    what = ".".join(map(re.escape, "".join(words[first:last]).split(".")))
    found = re.search(what, "".join(words))
    return found is not None and found.start() == len("".join(words[:first]))


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"
