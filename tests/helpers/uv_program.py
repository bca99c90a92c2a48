"""The ``uv`` that some tests make other environments with: that of PATH, or the one in this environment."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def uv_program() -> str | None:
    """Its path, or ``None``."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
