"""The reward that people gave: what more than half of those who labelled an episode said of it."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import HUMAN, consensus
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score, Trajectory


class HumanOptions(Frozen):
    """No options."""


class HumanReward:
    """The verdict of more than half of the labellers, each with what they said last; without one there is no reward.

    Labels become scores only when this reward is asked for (``score --reward human``, ``train --reward human``). An
    opinion in lists and statistics: it never takes the place of what a grader said.

    Examples:
        >>> from openhands_rl_plugin.core.records import LabelKind
        >>> said = [("ann", 1.0), ("bob", 0.0), ("cay", 1.0)]
        >>> labels = [
        ...     Label(id=who, trajectory_id="one", kind=LabelKind.VERDICT, value=value, author=who, at=0.0)
        ...     for who, value in said
        ... ]
        >>> score = HumanReward().from_labels("one", labels)
        >>> score.reward, score.detail
        (1.0, {'labellers': 3, 'agree': 2})
        >>> HumanReward().from_labels("one", labels[:2]).reward is None
        True
    """

    Options = HumanOptions
    version = f"{HUMAN}1"

    def __init__(self, options: HumanOptions | None = None) -> None:
        self.options = options or HumanOptions()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ``GraderError``: an episode itself does not say what people think of it."""
        raise GraderError("nobody gave a verdict that counts: openhands-rl score STORE --ask, or the studio")

    def from_labels(self, trajectory_id: str, labels: Sequence[Label]) -> Score | None:
        """As in ``JudgesLabels``."""
        said = consensus(labels)
        if said is None:
            return None
        detail: JsonObject = {"labellers": said.labellers, "agree": said.agree}
        return Score(trajectory_id=trajectory_id, reward=said.value, detail=detail, reward_version=self.version)
