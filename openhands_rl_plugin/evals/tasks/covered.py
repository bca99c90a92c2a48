"""A pytest plugin that prints which lines ran, as JSON, where Python can tell (3.12). It imports nothing of this
package."""

from __future__ import annotations

import json
import os
import sys
import types

_LINES: dict[str, list[int]] = {}
_ROOT = os.getcwd() + os.sep


def _on_line(code: types.CodeType, line: int) -> object:
    if code.co_filename.startswith(_ROOT):
        _LINES.setdefault(code.co_filename.removeprefix(_ROOT), []).append(line)
    return sys.monitoring.DISABLE


if hasattr(sys, "monitoring"):
    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "openhands-rl")
    sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, _on_line)
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)


def pytest_unconfigure() -> None:
    print(f"\nopenhands_rl_covered {json.dumps(_LINES)}")
