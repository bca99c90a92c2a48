"""Runs one script in the sandbox and writes its result as JSON. It imports nothing of this package.

``snippets.py SCRIPT RESULT``: the ``repr`` of the script's ``ACTUAL``, ``EXPECTED`` and ``HOLDS``, or its exception.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback


def main(script: str, result: str) -> None:
    """Run ``script`` and write ``result``, whatever the script raises."""
    sys.path.pop(0)
    found: dict[str, str] = {}
    try:
        names = runpy.run_path(script)
        found = {name: repr(names[name]) for name in ("ACTUAL", "EXPECTED", "HOLDS") if name in names}
    finally:
        if (error := sys.exc_info()[1]) is not None:
            said = "".join(traceback.format_exception_only(error)).strip()
            found = {"error": type(error).__name__, "message": said.partition(": ")[2]}
        with open(result, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
