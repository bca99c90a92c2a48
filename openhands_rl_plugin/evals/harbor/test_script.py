"""What a task's ``tests/test.sh`` installs before it tests, which has to be there without a network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.harbor.recipe import missing_packages

# Test scripts fetch these by ``apt-get`` only to install uv or pytest with them.
_HELPERS = frozenset({"curl", "wget", "ca-certificates", "python3", "python3-pip", "python3-venv", "git"})


class TestNeeds(Frozen):
    """``python`` is a version ("3.13") or empty. ``requirements`` are pip packages; ``missing``: what is not had."""

    __test__ = False

    python: str = ""
    requirements: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def needs_of(script: Path) -> TestNeeds:
    """Read a script: its ``uvx``, ``uv`` and ``pip install`` lines name a Python and packages, ``apt-get`` others."""
    text = re.sub(r"\\[ \t]*\n", " ", script.read_text(encoding="utf-8", errors="replace"))
    python, requirements, missing = "", [], []
    for line in text.splitlines():
        words = _words(line.strip())
        while words and words[0] in ("if", "!", "sudo", "then", "exec", "time", "do"):
            words = words[1:]
        if not words:
            continue
        program = words[0].rpartition("/")[2]
        if program in ("apt-get", "apt") and "install" in words:
            names = [word.partition("=")[0] for word in words[1:] if not word.startswith("-") and word != "install"]
            names = [name for name in names if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name) and name not in _HELPERS]
            missing += [f"the package {name} (tests/test.sh)" for name in missing_packages(names)]
        elif program == "uvx" or (program == "uv" and words[1:2] in (["run"], ["venv"], ["init"], ["add"], ["tool"])):
            found, wanted = _of_uv(words)
            python, requirements = python or found, requirements + wanted
        elif "install" in words and ("pip" in words[:4] or program in ("pip", "pip3")):
            after = words[words.index("install") + 1 :]
            requirements += [word for word in after if not word.startswith("-") and "/" not in word]
        elif program in ("docker", "npm", "npx", "cargo", "go"):
            missing.append(f"{program} (tests/test.sh)")
    return TestNeeds(python=python, requirements=tuple(dict.fromkeys(requirements)), missing=tuple(missing))


def _of_uv(words: list[str]) -> tuple[str, list[str]]:
    """The Python and the packages of one ``uv`` command."""
    python, wanted = "", []
    for at, word in enumerate(words):
        value = words[at + 1] if at + 1 < len(words) else ""
        if word in ("-p", "--python"):
            python = value
        elif word in ("-w", "--with", "--from"):
            wanted += value.split(",")
        elif word.startswith(("--with=", "--from=")):
            wanted += word.partition("=")[2].split(",")
    if words[:2] == ["uv", "add"]:
        wanted += [word for word in words[2:] if not word.startswith("-")]
    if words[0] == "uvx" and not wanted:
        wanted = [next((word for word in words[1:] if not word.startswith("-") and word != python), "pytest")]
    return ".".join(python.split(".")[:2]) if re.match(r"\d", python) else "", wanted


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


SHIMS = {
    "uvx": """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -p|--python|-w|--with|--from) shift 2;; *) shift;; esac; done
program=${1%%@*}; shift; exec "$program" "$@"
""",
    "uv": """#!/bin/bash
case $1 in
  run) shift
       while [[ $1 == -* ]]; do case $1 in -p|--python|--with|--project|--directory) shift 2;; *) shift;; esac; done
       exec "$@";;
  tool) shift; [[ $1 == run ]] && { shift; exec uvx "$@"; }; exit 0;;
  *) exit 0;;
esac
""",
    "pip": '#!/bin/bash\n[[ $1 == install ]] && exit 0\nexec python -m pip "$@"\n',
    "pip3": '#!/bin/bash\n[[ $1 == install ]] && exit 0\nexec python -m pip "$@"\n',
    "apt-get": "#!/bin/bash\nexit 0\n",
    "apt": "#!/bin/bash\nexit 0\n",
    # What is fetched with it is uv's installer, which is piped into a shell.
    "curl": """#!/bin/bash
case "$*" in *astral.sh/uv*|*install.sh*) echo :; exit 0;; esac
exec /usr/bin/curl "$@"
""",
}
"""Programs that stand before the system's while the tests run: what they would install is there already."""
