"""What tests need of the machine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap


def missing_bubblewrap() -> str:
    """Why there are no sandboxes here; empty where there are."""
    try:
        find_bubblewrap()
    except ConfigError as error:
        return str(error)
    return ""


needs_bubblewrap = pytest.mark.skipif(bool(missing_bubblewrap()), reason=missing_bubblewrap() or "there")

CONTRIB = find_spec("openhands_rl_plugin.contrib") is not None
needs_contrib = pytest.mark.skipif(not CONTRIB, reason="the package has no contrib")
