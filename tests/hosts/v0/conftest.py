"""A temporary folder of its own for this process: what others leave meanwhile does not count as left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from scripted_model import ScriptedModel, serve


@pytest.fixture(scope="package", autouse=True)
def own_temporary_files() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="rl-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model
