"""A number that others give is finite and in range, or the value that would hold it refuses it by name."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.records import Label, LabelKind, NodeMark
from openhands_rl_plugin.core.types import LARGEST, Frozen, Message, Node, Observation, Probe, Sample, Score, Tokens

pytestmark = pytest.mark.contract

SCORE = {"trajectory_id": "t", "reward": 1.0, "reward_version": "v"}
SAMPLE = {"trajectory_id": "t", "leaf": 0, "input_ids": (1, 2), "mask": (False, True), "logprobs": (0.0, -0.5)}
NODE = {"parent": None, "message": Message(role="assistant")}
LABEL = {"id": "l", "trajectory_id": "t", "kind": LabelKind.VERDICT, "at": 0.0}
VALUES: list[tuple[type[Frozen], dict[str, object], str]] = [
    *((Score, SCORE, name) for name in ("reward", "value", "weight")),
    (Observation, {}, "reward"),
    (Node, NODE, "reward"),
    (NodeMark, {"index": 0}, "reward"),
    (Label, LABEL, "value"),
    (Tokens, {"sampled_ids": (1,)}, "logprobs"),
    (Sample, SAMPLE, "logprobs"),
    (Probe, {"token_ids": (1, 2), "max_difference": 0.1}, "logprobs"),
]


@pytest.mark.parametrize(("kind", "given", "name"), VALUES, ids=lambda each: getattr(each, "__name__", str(each)[:9]))
def test_a_number_that_others_give_is_finite_and_in_range(
    kind: type[Frozen], given: dict[str, object], name: str
) -> None:
    def made(number: float) -> Frozen:
        return kind.model_validate({**given, name: (number,) if name == "logprobs" else number})

    for number in (LARGEST, -LARGEST, -0.0):
        assert kind.model_validate_json(made(number).model_dump_json()) == made(number)
    for odd in (math.nan, math.inf, -math.inf, 1e300):
        with pytest.raises(ValidationError) as caught:
            made(odd)
        start, _, shown = describe(caught.value).partition("got ")
        assert start.startswith(f"{kind.__name__}.{name}") and shown.strip("(,)") == str(odd)
        held = made(0.25).model_dump_json().replace("0.25", str(odd).replace("nan", "NaN").replace("inf", "Infinity"))
        with pytest.raises(ValidationError):
            kind.model_validate_json(held)


def test_logprobs_are_one_for_each_id_or_none() -> None:
    assert Tokens.known_logprobs([-0.5, 1e-7], 2) == (-0.5, 0.0)
    for odd in ([-0.5], [-0.5, math.nan], [-math.inf, -0.5], [-0.5, -1e300], [0.6, 0.9]):
        assert Tokens.known_logprobs(odd, 2) == ()
