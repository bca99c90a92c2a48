"""What the package makes of given inputs is what it made of them before, but for the differences that are listed."""

from __future__ import annotations

import os

import pytest
from artefacts import ARTEFACTS, Artefact, missing_host
from golden import differences, path_of, read
from needs import missing_bubblewrap

pytestmark = pytest.mark.contract

SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    ("name", "artefact"),
    [
        pytest.param(
            name, artefact, id=name, marks=(pytest.mark.slow, pytest.mark.timeout(1800)) if artefact.slow else ()
        )
        for name, artefact in ARTEFACTS.items()
    ],
)
def test_today_is_as_the_golden_file(name: str, artefact: Artefact) -> None:
    if missing := missing_host(artefact.host) or (artefact.sandboxed and missing_bubblewrap()):
        pytest.skip(missing)
    if artefact.variable and artefact.variable not in os.environ:
        pytest.skip(f"set {artefact.variable}")
    found = differences(name, read(name), artefact.make(), artefact.tolerance)
    assert not found, "\n".join(found[:40])


def test_the_files_are_small() -> None:
    assert sum(file.stat().st_size for file in path_of("").parent.iterdir() if file.is_file()) < 3_000_000
