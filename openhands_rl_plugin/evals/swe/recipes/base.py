"""The recipe of an instance: scripts for environment, installation and tests, and the name of the log parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from openhands_rl_plugin.core.types import Frozen

ReadFile = Callable[[str, str, str], str | None]
"""``(repo, commit, path)`` -> the file's text, or ``None`` when there is no such file.

Raises ``InfrastructureError`` when the repository is out of reach.
"""


class Recipe(Frozen):
    """Scripts as the official tools run them, in ``/bin/bash``, with the repository at ``/testbed``. Without the first
    two there is nothing but an image to run in.

    ``exclude_newer``: the date of which packages are installed, ``YYYY-MM-DD``; empty for today's. ``python``: a
    version as "3.9"."""

    environment_script: str
    install_script: str
    evaluation_script: str
    python: str
    parser: str
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    exclude_newer: str = ""
    image: str | None = None
