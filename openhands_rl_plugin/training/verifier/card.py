"""The metadata file of a trained verifier: everything that scoring needs to match training. No torch."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe
from openhands_rl_plugin.core.types import Adapter, Frozen

CARD_FILE = "verifier.json"
_MARK = 8  # hexadecimal digits


class VerifierOutput(NamedTuple):
    """``margin``: logit(YES) - logit(NO) in nats. ``mass``: p(YES) + p(NO) among all tokens, 1.0 at most."""

    margin: float
    mass: float


class Calibration(Frozen):
    """``P(YES) = sigmoid(slope * margin + offset)``, where ``margin`` is logit(YES) - logit(NO) in nats.

    The slope is the inverse of a temperature; the offset corrects for another share of successes than in training.
    """

    slope: float = Field(default=1.0, gt=0)
    offset: float = 0.0

    def probability(self, margin: float) -> float:
        """P(YES). With slope 1 and offset 0 it is p(YES) / (p(YES) + p(NO))."""
        return sigmoid(self.slope * margin + self.offset)


class VerifierCard(Frozen):
    """``CARD_FILE`` of an adapter directory.

    ``model``: the base model's directory. ``sha256``: of the adapter's weights file. ``max_length``: tokens of the
    longest prompt with its label. ``yes`` and ``no``: the token ids that are trained and scored. ``trained_on``: the
    digests of all tasks in the training data of this and earlier versions; missing in cards of earlier releases.
    ``adapt_experts``: as in the settings that it was trained with.
    """

    model: str
    sha256: str
    max_length: int = Field(ge=1)
    yes: int = Field(ge=0)
    no: int = Field(ge=0)
    calibration: Calibration = Calibration()
    trained_on: tuple[str, ...] | None = None
    adapt_experts: bool = False

    @property
    def version(self) -> str:
        """The reward version of its scores; it names everything that changes them."""
        calibrated = self.calibration
        suffix = "" if calibrated == Calibration() else f"/{calibrated.slope:.6g},{calibrated.offset:.6g}"
        return f"{VERSION_PREFIX}{self.sha256[:16]}/{self.max_length}{suffix}"

    def save(self, directory: Path) -> None:
        """Write it into an adapter directory."""
        (directory / CARD_FILE).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read it from an adapter directory. Raises ``ConfigError`` when there is none or it is damaged."""
        path = directory / CARD_FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{directory} is no verifier: it holds no {CARD_FILE}; give a version that `openhands-rl train "
                "--verifier` made"
            ) from error
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {describe(error)}; train the verifier again") from error


VERSION_PREFIX = "verifier-1@"
"""The prefix of all verifiers' reward versions: their scores must not be used as labels."""


def task_digest(task: str) -> str:
    """A short digest of a task. In a collision, the only effect is that the second task is not held out."""
    return hashlib.sha256(task.encode()).hexdigest()[:_MARK]


def tasks_trained_on(parent: Adapter | None) -> frozenset[str]:
    """The digests of the tasks in the training data of a verifier and its earlier versions.

    Raises ``TrainingError`` where they are unknown: it might be evaluated on its training data.
    """
    if parent is None:
        return frozenset()
    if not (Path(parent.path) / CARD_FILE).exists():
        raise TrainingError(f"{parent.name} is no verifier; choose another --adapter name, or --from base")
    if (marks := VerifierCard.load(Path(parent.path)).trained_on) is None:
        raise TrainingError(
            f"{parent.name} is of an earlier release, which did not record its training tasks, so a version trained "
            "from it might be evaluated on them: start over with --from base"
        )
    return frozenset(marks)


def sigmoid(x: float) -> float:
    """``1 / (1 + exp(-x))`` without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
