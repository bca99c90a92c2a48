"""The errors of the package as one tree, and the only gate through which foreign exceptions become values.

``RLError`` is what a caller catches. Its first line names the cause and the remedy and is fit to be shown to a person.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError

from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Failure, FailureKind

DEBUG = "OPENHANDS_RL_DEBUG"
"""The environment variable with which commands and servers show where an error comes from."""


class RLError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(RLError):
    """The configuration is wrong: an unknown key, a bad value, or a name that no plugin answers to."""


class UsageError(ConfigError):
    """The value of an option of the command line is wrong."""


class MissingExtraError(RLError):
    """Optional dependencies are not installed: ``package`` may be several, ``extra`` too, with commas."""

    def __str__(self) -> str:
        return "{} is not installed; get it with: pip install 'openhands_rl_plugin[{}]'".format(*self.args)


@contextmanager
def from_extra(extra: str, package: str = "") -> Iterator[None]:
    """Around imports of what an extra brings. Raises ``MissingExtraError`` that names the package, or the module."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(package or error.name or extra, extra) from error


class StorageError(RLError):
    """A record could not be written or read. Stops a run: nothing may be lost silently."""


class DamagedError(StorageError):
    """Stored data is damaged, in part or in whole."""


class TrainingError(RLError):
    """Training cannot continue: no usable samples, a non-finite loss, or a wrong checkpoint."""


class PublishError(RLError):
    """An adapter was refused, or the server does not serve the trained weights. The old version stays in use."""


class EpisodeError(RLError):
    """An episode did not reach a valid end. ``kind`` is the cause of the failure."""

    kind: ClassVar[FailureKind]


class InfrastructureError(EpisodeError):
    """A server is away, slow or overloaded. Worth a retry."""

    kind = FailureKind.INFRASTRUCTURE


class BadEnvironmentError(EpisodeError):
    """The environment answered something that its protocol does not allow."""

    kind = FailureKind.ENVIRONMENT


class ModelError(EpisodeError):
    """The model server refused the request (for reasons that a retry would not change)."""

    kind = FailureKind.MODEL


class GraderError(EpisodeError):
    """A reward could not be computed; the trajectory stays unscored."""

    kind = FailureKind.GRADER


class CaughtFailure(EpisodeError):
    """An exception that a boundary turned into a ``Failure``; ``failure`` holds the value."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def boundary(kind: FailureKind, what: str) -> Iterator[None]:
    """Turn any exception of the enclosed foreign code into ``CaughtFailure``.

    An ``EpisodeError`` keeps its own kind; any other exception gets ``kind``. Errors of storage, training, publishing
    and configuration pass through, because they must stop the run. Cancellation passes through too.
    """
    try:
        yield
    except CaughtFailure:
        raise
    except EpisodeError as error:
        raise CaughtFailure(Failure(kind=error.kind, message=describe(error), boundary=what)) from error
    except RLError:
        raise
    except Exception as error:
        raise CaughtFailure(Failure(kind=kind, message=describe(error), boundary=what)) from error


def describe(error: BaseException) -> str:
    """``"TypeName: first line of the message"`` or a value's first problem, at most 500 characters, without secrets."""
    if isinstance(error, ValidationError):
        one = error.errors(include_url=False)[0]
        where = ".".join(map(str, (error.title, *one["loc"])))
        return f"{where}: {redact_text(f'{one["msg"]}, got {one["input"]!r:.80}')}"[:500]
    # Redacted before it is cut: half a key has no known shape.
    text = redact_text(str(error).strip()[:100_000]).splitlines()
    return f"{type(error).__name__}: {text[0]}"[:500] if text else type(error).__name__


Location = tuple[str, ...]


def problems(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Location, str]]:
    """Where each problem lies (keys only, without list indices) and what it is, on one line."""
    for one in error.errors(include_url=False):
        location = tuple(part for part in one["loc"] if isinstance(part, str))
        if one["type"] == "extra_forbidden":
            yield location, f"unknown key; {available(_fields_at(model, location[:-1]))}"
        elif one["type"] == "value_error":
            yield location, one["msg"].removeprefix("Value error, ")
        elif one["type"] == "missing":
            yield location, "is required"
        else:
            yield location, f"{one['msg'].replace('Input should', 'must')}, got {one['input']!r:.80}"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown <what> 'nmae'; available: ...``"""
    return f"unknown {what} {name!r}; {available(known)}"


def available(known: Iterable[str]) -> str:
    """All known names."""
    return f"available: {', '.join(sorted(known)) or 'none'}"


def _fields_at(model: Any, location: Location) -> Iterable[str]:
    for key in location:
        model = getattr(getattr(model, "model_fields", {}).get(key), "annotation", None)
    return getattr(model, "model_fields", ())
