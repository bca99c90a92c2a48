"""Functions cut out of modules, the bugs in them, and the edits that make and mend these."""

from __future__ import annotations

import ast
import builtins
import difflib
import keyword
import re

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.tasks.bugs import PythonSource, bugs_of

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
    # A pure insertion needs a neighbouring word; a text that also occurs earlier in the line needs the words before it.
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


_NAME = re.compile(r"[^\W\d]\w*")
_COMMON = frozenset({*keyword.kwlist, *dir(builtins), *dir(str), *dir(list), *dir(dict)})
"""Names that a repair may need though the line does not have them."""
_LONGEST = 48
"""The most characters of an edit if only its line is known: longer ones cannot be guessed, so not learnt."""


def function_hint(text: str, name: str, line: str) -> str:
    """The text after a line's place: its function's head, or a colon if the line is the head."""
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


def bugs_in(text: str, name: str) -> list[tuple[str, str]]:
    """``(kind, text with the bug)`` for every bug of the module's function ``name``, without repetitions."""
    source = PythonSource(text)
    return [(bug.kind, source.apply(bug.edits)) for bug in bugs_of("", text) if bug.function == name]


LONGEST_FUNCTION, LEAST_FUNCTION, MOST_CHARACTERS = 25, 3, 1600


class LoneFunction(Frozen):
    """A module of one function, with the path of the module that it was cut out of."""

    path: str
    name: str
    text: str


def lone_function(path: str, node: ast.FunctionDef) -> LoneFunction | None:
    """A function or a method as a module of its own, without what it needs; ``None`` for one that is too long or too
    short.

    The text is normalised: no comments, no annotations, of docstrings the first line.
    """
    try:
        text = ast.unparse(ast.fix_missing_locations(_Plain().visit(ast.parse(ast.unparse(node)).body[0]))) + "\n"
        compile(text, "function", "exec")
    except (RecursionError, SyntaxError):
        return None
    fits = LEAST_FUNCTION <= text.count("\n") <= LONGEST_FUNCTION and len(text) <= MOST_CHARACTERS
    return LoneFunction(path=path, name=node.name, text=text) if fits else None


class _Plain(ast.NodeTransformer):
    """Drops annotations and docstrings; of the outermost docstring the first line stays."""

    _outermost = True

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._outermost, keep = False, self._outermost
        docstring = ast.get_docstring(node)
        body = node.body[1:] if docstring is not None else node.body
        line = docstring.strip().partition("\n")[0].strip() if docstring and keep else ""
        first: list[ast.stmt] = [ast.Expr(ast.Constant(line))] if 0 < len(line) <= 100 and line.isprintable() else []
        node.body = [*first, *body] or [ast.Pass()]
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
