"""Every seam shows an example; ``tests/docs/test_docstrings.py`` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

from openhands_rl_plugin.core import protocols


def test_every_seam_has_an_example() -> None:
    tree = ast.parse(Path(protocols.__file__).read_text(encoding="utf-8"))
    seams = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [seam.name for seam in seams if ">>>" not in (ast.get_docstring(seam) or "")] == []
