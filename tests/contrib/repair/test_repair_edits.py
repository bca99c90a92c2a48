"""Edits of repair tasks as commands of ``sed``: run, they make what was asked for, and they are short."""

from __future__ import annotations

import itertools
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.contrib.repair.bugs import bugs_in, sed_script
from openhands_rl_plugin.contrib.repair.demonstrations import library_functions


def edited(text: str, script: str, file: Path) -> str:
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(["sed", "-i", script, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, (script, done.stderr)
    return file.read_text(encoding="utf-8")


def test_what_the_script_makes_is_the_fix(tmp_path: Path):
    for function in itertools.islice(library_functions(random.Random(1)), 12):
        for _, wrong in itertools.islice(bugs_in(function.text, function.name), 8):
            assert edited(wrong, sed_script(wrong, function.text), tmp_path / "x").rstrip() == function.text.rstrip()


LINES = st.lists(st.text(r"ab01 =/|#,.*[]^$&\'\"(", min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(LINES, LINES)
def test_any_text_becomes_any_other(tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str]):
    if old == new:
        return
    file = tmp_path_factory.mktemp("sed") / "x"
    before, after = "\n".join([*old, ""]), "\n".join([*new, ""])
    script = sed_script(before, after)
    # It is a line, and the shell's "read -r" takes away no more than spaces at its end.
    assert "\n" not in script and script == script.lstrip()
    assert edited(before, script, file) == after
