"""``tox --current-env -e ENV -- FILES``: the commands of ``tox.ini`` in the active environment. tox itself would link
the interpreter to another place, where a virtual environment does not find its packages.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys

from common import python

DEFAULT = "python -X dev -m pytest -rA --durations 25 {posargs}"


def main(words: list[str]) -> int:
    """Run them; the exit status is the first one that is not 0."""
    given = words[words.index("--") + 1 :] if "--" in words else []
    commands, variables = read("tox.ini")
    environment = {**os.environ, **variables}
    for command in commands:
        parts = shlex.split(substitute(command, shlex.join(given)))
        if parts and parts[0] == "python":
            parts[0] = python()
        if status := subprocess.run(parts, env=environment, check=False).returncode:
            return status
    return 0


def read(path: str) -> tuple[list[str], dict[str, str]]:
    """The commands and variables of ``[testenv]``."""
    parser = configparser.RawConfigParser(strict=False)
    parser.read(path, encoding="utf-8")
    if not parser.has_section("testenv"):
        return [DEFAULT], {}
    commands = [line for line in parser.get("testenv", "commands", fallback=DEFAULT).splitlines() if line.strip()]
    lines = parser.get("testenv", "setenv", fallback="").splitlines()
    settings = [line.split("=", 1) for line in lines if "=" in line and not line.lstrip().startswith("#")]
    return commands, {name.strip(): substitute(value.strip(), "") for name, value in settings if ":" not in name}


def substitute(text: str, given: str) -> str:
    """``text`` with tox's names in braces replaced."""
    default = re.compile(r"\{posargs(?::([^{}]*))?\}")
    text = default.sub(lambda match: given or match[1] or "", text)
    known = {"envpython": python(), "toxinidir": os.getcwd(), "envdir": os.path.dirname(os.path.dirname(python()))}
    text = re.sub(r"\{env:(\w+)(?::([^{}]*))?\}", lambda match: os.environ.get(match[1], match[2] or ""), text)
    return re.sub(r"\{(\w+)\}", lambda match: known.get(match[1], ""), text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
