"""Bugs in functions: functions cut out of packages, kinds of bugs, the edits that make and mend them."""

from __future__ import annotations

import ast
import builtins
import difflib
import itertools
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.tasks.bugs import Edit, Mutation, PythonSource, blocks, mutations, own_nodes, parse

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


_MOST_OTHERS = 3
_OTHER_TEXT = dict(zip(("", " ", *"_-,./:0"), (" ", "", *"-_;,.;1"), strict=True))
_OTHER_DEFAULT = {"": "' '", " ": "''", "_": "'-'", "-": "'_'", ",": "';'", None: "0"}


def _own_mutations(source: PythonSource, function: ast.FunctionDef) -> Iterator[Mutation]:
    """Kinds that only functions of a few lines have."""
    arguments = function.args
    known = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    nodes = [*own_nodes(function)]
    known += [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names = list(dict.fromkeys(known))

    def bug(kind: str, node: ast.expr, text: str) -> Mutation:
        return Mutation(kind, node.lineno, (source.replaced(node, text),))

    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in names:
                for other in [other for other in names if other != name][:_MOST_OTHERS]:
                    yield bug("other_variable", node, other)
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None)) if not (lower and upper):
                if bound := lower or upper:
                    text = source.text(bound)
                    yield bug("other_index", node.slice, f"{text}:" if upper else f":{text}")
            case ast.Subscript(slice=ast.Constant() | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()) as index):
                at = ast.literal_eval(index)
                if type(at) is int:
                    for other in {0: (1, -1), -1: (0, -2)}.get(at, (at - 1, at + 1)):
                        yield bug("other_index", index, str(other))
            case ast.Constant(value=str() as text) if text in _OTHER_TEXT:
                yield bug("other_text", node, repr(_OTHER_TEXT[text]))
    for statement in itertools.chain.from_iterable(blocks(function)):
        if isinstance(statement, ast.Return) and statement.value and not isinstance(statement.value, ast.Constant):
            start, end = source.span(statement)[0], source.span(statement.value)[0]
            yield Mutation("drop_return", statement.lineno, (Edit(start, end, ""),))
    for default in (*arguments.defaults, *arguments.kw_defaults):
        if (
            isinstance(default, ast.Constant)
            and isinstance(text := default.value, str | None)
            and text in _OTHER_DEFAULT
        ):
            yield bug("other_default", default, _OTHER_DEFAULT[text])


KINDS: Mapping[str, tuple[str, ...]] = {
    "operator": ("swap_operator", "swap_boolean_operator"),
    "comparison": ("move_boundary",),
    "off by one": ("miss_by_one",),
    "constant": ("shift_number", "flip_boolean", "other_text"),
    "wrong variable": ("other_variable",),
    "missing return": ("drop_return",),
    "swapped arguments": ("swap_arguments", "swap_operands"),
    "inverted condition": ("negate_condition", "swap_branches"),
    "missing case": ("drop_guard", "drop_clause", "drop_assignment"),
    "wrong index": ("other_index",),
    "wrong method": ("swap_name", "drop_conversion"),
    "wrong default": ("change_default", "other_default"),
}
"""Kind -> the kinds of mutations that make it."""


def bugs_in(text: str, name: str) -> Iterator[tuple[str, str]]:
    """``(kind, text with the bug)`` for every bug of the module's function ``name``, without repetitions."""
    source = PythonSource(text)
    node = next(each for each in source.tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    found = [*mutations(source, node), *_own_mutations(source, node)]
    seen = {ast.dump(source.tree)}
    for kind, makers in KINDS.items():
        for mutation in sorted(
            (each for each in found if each.kind in makers), key=lambda each: makers.index(each.kind)
        ):
            try:
                changed = source.apply(mutation.edits)
                meaning = ast.dump(parse(changed))
                compile(changed, "bug", "exec")
            except (SyntaxError, ValueError):
                continue
            if meaning not in seen:
                seen.add(meaning)
                yield kind, changed


LONGEST_FUNCTION, LEAST_FUNCTION = 25, 3
LONGEST_MODULE, MOST_CHARACTERS = 44, 1600
_MODULES = frozenset(
    (
        *("abc", "base64", "binascii", "bisect", "calendar", "codecs", "collections", "colorsys", "copy", "decimal"),
        *("difflib", "fractions", "functools", "hashlib", "heapq", "html", "itertools", "json", "keyword", "math"),
        *("numbers", "operator", "posixpath", "re", "statistics", "string", "struct", "textwrap", "types", "typing"),
        *("unicodedata", "urllib", "warnings", "zlib"),
    )
)
"""Modules of the standard library whose functions depend on their arguments alone."""
_BUILTINS = frozenset(dir(builtins))
_KNOWN = frozenset({"__name__", "__doc__", "__file__"})


class SlicedFunction(Frozen):
    """A module with one function and what it needs. ``path`` as in the package, below its folder of imports."""

    path: str
    name: str
    text: str


class _NoSliceError(Exception):
    """A function that cannot stand alone, or is too long."""


@dataclass
class _Module:
    path: str
    names: dict[str, ast.stmt]
    stars: bool


@dataclass
class _Slice:
    imports: dict[str, None] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    """Name -> text of the statement, in the order of definition."""
    origin: dict[str, ast.stmt] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)


class PackageSlicer:
    """Slices functions out of a package's modules: path below the folder of imports -> text."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._modules: dict[str, _Module | None] = {}

    def slice(self, path: str, name: str) -> SlicedFunction | None:
        """The function as a module; ``None`` when it needs what cannot come along, or is too long or too short.

        The text is normalised: no comments, no annotations, of docstrings the first line.
        """
        module = self._module(path)
        if module is None or not isinstance(node := module.names.get(name), ast.FunctionDef) or node.decorator_list:
            return None
        found = _Slice()
        try:
            self._add(found, module, name)
            text = _written(found)
        except (_NoSliceError, RecursionError, SyntaxError):
            return None
        lines = found.parts[name].count("\n") + 1
        fits = LEAST_FUNCTION <= lines <= LONGEST_FUNCTION and len(text.splitlines()) <= LONGEST_MODULE
        return SlicedFunction(path=path, name=name, text=text) if fits and len(text) <= MOST_CHARACTERS else None

    def _module(self, path: str) -> _Module | None:
        if path not in self._modules:
            self._modules[path] = _indexed(path, self._texts.get(path))
        return self._modules[path]

    def _add(self, found: _Slice, module: _Module, name: str) -> None:
        if name not in module.names:
            raise _NoSliceError(name)
        node = module.names[name]
        if name in found.origin:
            if found.origin[name] is not node:
                raise _NoSliceError(f"two meanings of {name}")
            return
        found.origin[name] = node
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._add_import(found, module, node, name)
            return
        plain = _plain(node, keep=not found.open)
        found.open.add(name)
        for needed in sorted(_free_names(plain)):
            if needed in module.names:
                self._add(found, module, needed)
            elif needed not in _BUILTINS | _KNOWN or module.stars:
                raise _NoSliceError(needed)
        found.parts[name] = ast.unparse(ast.fix_missing_locations(plain))
        if len(found.parts) > 8 or sum(map(len, found.parts.values())) > MOST_CHARACTERS:
            raise _NoSliceError("too long")

    def _add_import(self, found: _Slice, module: _Module, node: ast.Import | ast.ImportFrom, name: str) -> None:
        alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
        top = (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        if level == 0 and top.partition(".")[0] in _MODULES:
            only = ast.ImportFrom(node.module, [alias], 0) if isinstance(node, ast.ImportFrom) else ast.Import([alias])
            found.imports[ast.unparse(only)] = None
            return
        if not isinstance(node, ast.ImportFrom) or alias.asname not in (None, alias.name):
            raise _NoSliceError(f"import of {top}")
        there = self._from(module, node)
        if there is None:
            raise _NoSliceError(f"import of {top}")
        del found.origin[name]
        self._add(found, there, alias.name)

    def _from(self, module: _Module, node: ast.ImportFrom) -> _Module | None:
        folders = module.path.split("/")[:-1]
        if node.level > len(folders):
            return None
        base = folders[: len(folders) - node.level + 1] if node.level else []
        stem = "/".join([*base, *(node.module or "").split(".")]).strip("/")
        return self._module(f"{stem}.py") or self._module(f"{stem}/__init__.py")


def lone_function(path: str, node: ast.FunctionDef) -> SlicedFunction | None:
    """A function or a method as a module of its own, without what it needs; ``None`` as for ``PackageSlicer.slice``."""
    try:
        text = ast.unparse(_plain(node, keep=True)) + "\n"
        compile(text, "function", "exec")
    except (_NoSliceError, RecursionError, SyntaxError):
        return None
    fits = LEAST_FUNCTION <= text.count("\n") <= LONGEST_FUNCTION and len(text) <= MOST_CHARACTERS
    return SlicedFunction(path=path, name=node.name, text=text) if fits else None


def _indexed(path: str, text: str | None) -> _Module | None:
    if text is None:
        return None
    try:
        tree = parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    names: dict[str, ast.stmt] = {}
    twice: set[str] = set()
    stars = False
    for node in tree.body:
        bound = list(_bound(node))
        stars = stars or "*" in bound
        for name in bound:
            if name in names:
                twice.add(name)
            names[name] = node
    return _Module(path, {name: node for name, node in names.items() if name not in twice}, stars)


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds in a way that a slice can repeat."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (each.asname or each.name.partition(".")[0] for each in node.names)
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id


class _Plain(ast.NodeTransformer):
    """Drops annotations and docstrings; of the outermost docstring the first line stays if ``keep``."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._keep, keep = False, self._keep
        docstring = ast.get_docstring(node)
        body = node.body[1:] if docstring is not None else node.body
        line = docstring.strip().partition("\n")[0].strip() if docstring and keep else ""
        first: list[ast.stmt] = [ast.Expr(ast.Constant(line))] if 0 < len(line) <= 100 and line.isprintable() else []
        node.body = [*first, *body] or [ast.Pass()]
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        raise _NoSliceError("async")

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        raise _NoSliceError("a class")

    def visit_Global(self, node: ast.Global) -> ast.AST:
        raise _NoSliceError("global state")

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node.value is None:
            return ast.Pass()
        return ast.Assign([node.target], node.value)


def _plain(node: ast.stmt, *, keep: bool) -> ast.stmt:
    copied = ast.parse(ast.unparse(node)).body[0]
    changed = _Plain(keep).visit(copied)
    return ast.fix_missing_locations(changed)


def _free_names(node: ast.stmt) -> set[str]:
    """Names that a statement reads and does not bind anywhere within it."""
    read: set[str] = set()
    bound: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            (read if isinstance(each.ctx, ast.Load) else bound).add(each.id)
        elif isinstance(each, ast.arg):
            bound.add(each.arg)
        elif isinstance(each, ast.FunctionDef | ast.ExceptHandler) and each.name:
            bound.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            _check_stdlib(each)
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
    if isinstance(node, ast.FunctionDef):
        outer = ast.Module([*map(ast.Expr, _outer_parts(node))], [])
        read |= {each.id for each in ast.walk(outer) if isinstance(each, ast.Name)}
        return {name for name in read if name not in bound or name in _names_of(_outer_parts(node))} - {node.name}
    return read - bound if not isinstance(node, ast.Assign) else read


def _outer_parts(node: ast.FunctionDef) -> Sequence[ast.expr]:
    """What is evaluated where the function is defined."""
    return [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]


def _names_of(parts: Sequence[ast.expr]) -> set[str]:
    return {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}


def _check_stdlib(node: ast.Import | ast.ImportFrom) -> None:
    tops = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
    relative = isinstance(node, ast.ImportFrom) and node.level
    if relative or any(top.partition(".")[0] not in _MODULES for top in tops):
        raise _NoSliceError("an import within the function")


def _written(found: _Slice) -> str:
    head = "\n".join(sorted(found.imports))
    body = ""
    for text in found.parts.values():
        lone = not text.startswith(("def ", "@"))
        body = body + text + "\n" if lone else body.rstrip("\n") + ("\n\n" if body else "") + text + "\n\n"
    text = (head + "\n\n" if head else "") + body.rstrip("\n") + "\n"
    compile(text, "slice", "exec")
    return text
