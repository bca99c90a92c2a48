"""What the API would answer, by its addresses, as far as a file of bounded size holds it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from openhands_rl_plugin.contrib.studio.document import single_file
from openhands_rl_plugin.core.types import JsonObject

MOST_BYTES = 8 * 1024 * 1024
"""Of the whole file."""


class Answers:
    """``start``: the address of the page that the file opens with. What does not fit is named on the page."""

    def __init__(self, title: str, start: str, most: int = MOST_BYTES) -> None:
        self._title = title
        self._start = start
        self._data: JsonObject = {}
        self._left_out: list[str] = []
        self._room = most - len(single_file(self._all(), title)) - _SPARE

    def add(self, what: str, answers: Mapping[str, JsonObject]) -> bool:
        """All of ``answers``, or none where they do not fit: then ``what`` is named as left out, if it has a name."""
        weight = sum(_weight(address, body) for address, body in answers.items())
        if weight > self._room:
            if what:
                self.leave_out(what)
            return False
        self._room -= weight
        self._data.update(answers)
        return True

    def leave_out(self, what: str) -> None:
        """Name something that is not in the file."""
        if len(self._left_out) < _MOST_NAMED:
            self._left_out.append(what[:_LONGEST_NAME])

    def page(self) -> str:
        """The file's text."""
        return single_file(self._all(), self._title)

    def _all(self) -> JsonObject:
        about: JsonObject = {"version": 1, "made": time.time(), "start": self._start, "left_out": [*self._left_out]}
        return {**self._data, "export": about}


_MOST_NAMED, _LONGEST_NAME = 100, 200
_SPARE = 160 * 1024
"""For the names of what is left out, as long as escapes make them."""


def address(where: str, *parameters: str) -> str:
    """The address of an answer in the file: ``static/base/local.mjs`` looks for the same one."""
    return f"{where}?{'&'.join(parameters)}" if parameters else where


def _weight(where: str, body: JsonObject) -> int:
    """Bytes in the file: JSON within a text of a module, which is a ``data:`` URL."""
    return len(json.dumps(json.dumps({where: body}))) * 4 // 3 + 4
