"""A query as a value: what to find, in which order."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from openhands_rl_plugin.core.browsing.terms import Match, Term
from openhands_rl_plugin.core.records import TrajectoryOrder
from openhands_rl_plugin.core.types import Frozen


class Note(StrEnum):
    """What is known of an episode beside its columns: the labels that hold, causes of breaks, and opinions: what people
    labelled and what verifiers say."""

    LABEL = "label"
    BREAK = "break"
    HUMAN = "human"
    VERIFIER = "verifier"


OPINION_NOTES = frozenset({Note.HUMAN, Note.VERIFIER})
"""Notes that are numbers: the ``OPINIONS`` of ``core.judgements``."""


class NoteTerm(Frozen):
    """One of ``any_of`` names a label (its kind, its text, or what ``words_of`` says) or a cause, or holds of an
    opinion; with ``negated`` none of them does."""

    note: Note
    any_of: tuple[Match, ...] = Field(min_length=1)
    negated: bool = False


class TextTerm(Frozen):
    """A text that a message of the episode has, or with ``negated`` none has."""

    text: str
    negated: bool = False


class Query(Frozen):
    """All conditions must hold. ``sort``: the order that was asked for, if any."""

    terms: tuple[Term, ...] = ()
    notes: tuple[NoteTerm, ...] = ()
    texts: tuple[TextTerm, ...] = ()
    sort: TrajectoryOrder | None = None
    descending: bool = False
