"""Which bugs can be repaired from what a statement tells at level 1: the line and the head of its function."""

from __future__ import annotations

import builtins
import keyword
import re

from openhands_rl_plugin.contrib.repair.edits import line_edit, sed_script

_NAME = re.compile(r"[^\W\d]\w*")
_COMMON = frozenset({*keyword.kwlist, *dir(builtins), *dir(str), *dir(list), *dir(dict)})
"""Names that a repair may need though the line does not have them."""
_LONGEST = 48
"""Characters of an edit, where the line is all that is known: what nobody can guess is not to be learnt."""


def function_told(text: str, name: str, line: str) -> str:
    """What follows the place of a line: the head of its function, or a colon where the line is the head."""
    heads = (each.strip() for each in text.split("\n"))
    return next((f", in {each}" for each in heads if each.startswith(f"def {name}(") and each != line), ":")


def is_told(wrong: str, right: str, name: str) -> bool:
    """Whether the line with the bug and the head of the function have every name that the repair needs."""
    edit = line_edit(wrong, right)
    if not edit.is_of_words or len(sed_script(wrong, right)) > _LONGEST:
        return False
    lines = wrong.split("\n")
    head = next((line for line in lines if line.startswith(f"def {name}(")), "")
    known = {*_NAME.findall(lines[edit.first - 1]), *_NAME.findall(head), *_COMMON}
    return known.issuperset(_NAME.findall(edit.lines[0]))
