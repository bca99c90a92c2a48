"""These tests need OpenHands V1 in an environment of its own: ``make test-v1``, ``make test-v1-matrix``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


collect_ignore_glob = [] if _installed("openhands-sdk") and not _installed("openhands-ai") else ["test_*.py"]

pytest.register_assert_rewrite("side_by_side")

# Before the SDK is imported: its own files in the user's home, and its banner.
os.environ.setdefault("OPENHANDS_SUPPRESS_BANNER", "1")
os.environ.setdefault("OH_PERSISTENCE_DIR", tempfile.mkdtemp(prefix="rl-v1-"))


@pytest.fixture(scope="module")
def server() -> Iterator[object]:
    """A scripted model server."""
    from scripted_model import serve

    with serve() as model:
        # With today's litellm the SDK's telemetry fails at these details, with the stock agent too.
        model.cached = None if version("openhands-sdk").startswith("1.49.") else model.cached
        yield model


@pytest.fixture(scope="package", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Without start-up files, which the stock terminal's shell would run each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with one file that is wrong."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return folder
