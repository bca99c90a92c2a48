"""What a modifier is given and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from openhands_rl_plugin.evals.tasks.bugs.positions import Definition, Edit, Function, Source


@dataclass(frozen=True)
class FunctionSite:
    """A function of a file: where a modifier may change something."""

    source: Source
    node: Function
    name: str


@dataclass(frozen=True)
class ClassSite:
    """A class of a file."""

    source: Source
    node: Definition
    name: str


@dataclass(frozen=True)
class Mutation:
    """One possible bug: the edits, and the line (from 1) that has to be executed for the bug to show."""

    edits: tuple[Edit, ...]
    line: int


type FunctionModifier = Callable[[FunctionSite], Iterator[Mutation]]
type ClassModifier = Callable[[ClassSite], Iterator[Mutation]]


def one(edit: Edit, line: int) -> Mutation:
    """A bug of a single edit."""
    return Mutation((edit,), line)
