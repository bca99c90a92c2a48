"""The places that a patch touches, or that an answer names, in a repository as it was before the fix."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from openhands_rl_plugin.core.records import Places
from openhands_rl_plugin.evals.tasks.localization.outline import Outline, Scope, changed

MOST_PLACES = 500
"""An answer or a patch with more files, modules or functions than this says nothing."""
LONGEST_ANSWER = 2**18
"""Characters. A longer answer says nothing."""

type Read = Callable[[str], str | None]
"""The text of a file of the repository; ``None`` for a path that it has not, or that is no text."""

_SEPARATORS = re.compile(r"[\s`'\"<>|,;()\[\]{}*]+")
_PLACE = re.compile(
    r"(?P<path>[^:#]+)"
    r"(?:::?(?P<name>[^\W\d]\w*(?:(?:\.|::)[^\W\d]\w*)*)|(?::|#)L?(?P<first>\d{1,7})(?:[-\u2013:]L?(?P<last>\d{1,7}))?)?"
)
_PYTHON = (".py", ".pyi")


class Located(NamedTuple):
    """Places, and which of their files count as a whole."""

    places: Places
    whole_files: tuple[str, ...] = ()


def places_of_change(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> Located:
    """The places of ``before`` that differ in ``after``: path -> text, ``None`` where there is no such file, or none
    that is text. Files that are new count only where nothing else changes: nobody can find them.
    """
    found: set[tuple[str, Scope]] = set()
    whole: set[str] = set()
    there = [path for path in before if before[path] is not None]
    for path in there or before:
        found.add((path, Scope()))
        old, new = outline_of(path, before[path]), outline_of(path, after.get(path))
        if old is None or new is None:
            whole.add(path)
        else:
            found |= {(path, scope) for scope in changed(old, new)}
    return Located(_places(found), tuple(sorted(whole)))


def places_of_answer(text: str, files: Container[str], read: Read, folders: Iterable[str]) -> Located:
    """The places that an answer names: ``path``, ``path::Class``, ``path::Class.method``, ``path::function`` or lines,
    ``path:10-20``, anywhere in it. ``files``: those of the repository. ``folders``: where it stood for the agent.

    What looks like a path and is no file counts as a wrong one; other words do not count. None at all are the places of
    an answer that is too long or names too many.
    """
    if len(text) > LONGEST_ANSWER:
        return Located(Places())
    found: set[tuple[str, Scope]] = set()
    outlines: dict[str, Outline | None] = {}
    for path, place in _mentions(text, tuple(folders)):
        if path not in files and not _looks_like_a_path(path, place):
            continue
        if path not in outlines:
            if len(outlines) == MOST_PLACES:
                return Located(Places())
            outlines[path] = outline_of(path, read(path)) if path in files else None
        outline = outlines[path]
        found |= {(path, Scope()), *((path, scope) for scope in (_scopes(place, outline) if outline else ()))}
    whole = tuple(sorted(path for path, outline in outlines.items() if outline is None))
    return Located(_places(found), whole)


def outline_of(path: str, text: str | None) -> Outline | None:
    """The outline of a Python file; ``None`` for another one, and for one that Python cannot read."""
    if text is None or not path.endswith(_PYTHON):
        return None
    try:
        return Outline(text)
    except SyntaxError:
        return None


def _mentions(text: str, folders: tuple[str, ...]) -> Iterator[tuple[str, re.Match[str]]]:
    for word in _SEPARATORS.split(text):
        word = word.rstrip(".:!?")
        if (place := _PLACE.fullmatch(word)) and (path := _inside(place["path"], folders)):
            yield path, place


def _inside(path: str, folders: tuple[str, ...]) -> str:
    """The path from the repository's root; one that leads out of it stays as it is, and is no file."""
    for folder in folders:
        if path.startswith(f"{folder}/"):
            path = path.removeprefix(f"{folder}/")
            break
    return path if path.startswith("/") else posixpath.normpath(path)


def _looks_like_a_path(path: str, place: re.Match[str]) -> bool:
    return path.endswith(_PYTHON) or ("/" in path and bool(place["name"] or place["first"]))


def _scopes(place: re.Match[str], outline: Outline) -> frozenset[Scope]:
    if place["first"]:
        first = int(place["first"])
        return outline.at(*sorted((first, int(place["last"] or first))))
    if not place["name"]:
        return frozenset()
    name = place["name"].replace("::", ".")
    known = outline.named(name)
    # A name that the file has not is a wrong one.
    return frozenset({known if known is not None else Scope(name.rpartition(".")[0] or name, name)})


def _places(found: Iterable[tuple[str, Scope]]) -> Places:
    files = {path for path, _ in found}
    modules = {f"{path}::{scope.module}" for path, scope in found if scope.module}
    functions = {f"{path}::{scope.function}" for path, scope in found if scope.function}
    if max(map(len, (files, modules, functions))) > MOST_PLACES:
        return Places()
    return Places(files=tuple(sorted(files)), modules=tuple(sorted(modules)), functions=tuple(sorted(functions)))
