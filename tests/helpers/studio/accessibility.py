"""What axe-core finds on a page: contrast, names, roles, order, the keyboard."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "axe-core" / "axe.min.js"
_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"


def found_by_axe(page: Any) -> list[str]:
    """One line for each rule and element; the page's window has to have been opened with ``bypass_csp``."""
    source = _FILE.read_bytes()
    assert hashlib.sha256(source).hexdigest() == _SHA256
    page.evaluate(source.decode())
    result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary'][:240]}"
        for rule in result["violations"]
        for node in rule["nodes"][:3]
    ]
