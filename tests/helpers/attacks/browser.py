"""A real browser without a window, where there is one: what a page does when it is opened."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def missing_browser() -> str:
    """Why no page can be opened; empty where one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if PROGRAM else "there is no Chromium (Debian: apt-get install chromium)"


needs_browser = pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "there")
