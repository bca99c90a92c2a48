"""These tests need OpenHands V1 in an environment of its own: ``make test-v1``, ``make test-v1-matrix``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


collect_ignore_glob = [] if _installed("openhands-sdk") and not _installed("openhands-ai") else ["test_*.py"]
