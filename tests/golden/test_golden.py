"""What the package makes of given inputs is what it made of them before, but for the differences that are listed."""

from __future__ import annotations

import os

import pytest
from artefacts import ARTEFACTS, Artefact, missing_host
from golden import differences, read, run_script
from needs import missing_bubblewrap

pytestmark = pytest.mark.contract

SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))
GRADIENTS = (
    *("sft", "reinforce++-baseline", "rloo", "dr-grpo", "dapo", "gspo", "cispo", "dpo"),
    *("k3", "truncate", "step rewards", "states", "four steps", "all weights, grpo"),
)
"""Each algorithm and each part of the loss once; the slow test has all that they can be combined with."""


@pytest.mark.parametrize(
    ("name", "artefact"),
    [
        pytest.param(name, artefact, id=name, marks=SLOW if artefact.slow else ())
        for name, artefact in ARTEFACTS.items()
        if artefact.host == "v0" or missing_host("v0")  # in an environment with both, V0 alone works
    ],
)
def test_today_is_as_the_golden_file(name: str, artefact: Artefact) -> None:
    if missing := missing_host(artefact.host) or (artefact.sandboxed and missing_bubblewrap()):
        pytest.skip(missing)
    if artefact.variable and artefact.variable not in os.environ:
        pytest.skip(f"set {artefact.variable}")
    found = differences(name, read(name), artefact.make(), artefact.tolerance)
    assert not found, "\n".join(found[:40])


@pytest.mark.skipif(bool(missing_host("v0")), reason=missing_host("v0"))
def test_gradients_of_each_kind_are_as_the_golden_file() -> None:
    golden = read("gradients")
    made = run_script("gradients.py", *GRADIENTS)
    tolerance = ARTEFACTS["gradients"].tolerance
    assert not differences("gradients", {name: golden[name] for name in GRADIENTS}, made, tolerance)
