"""A temporary folder of its own for this process: what others leave meanwhile does not count as left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def own_temporary_files() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="rl-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def no_configuration_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test made OpenHands read in this process is not this one's [rl]."""
    from openhands_rl_plugin.hosts.v0 import settings

    monkeypatch.setattr(settings._seen, "file", None)
