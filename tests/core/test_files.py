from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openhands_rl_plugin.core.files import PRIVATE, replacing, write_file


def test_a_file_is_replaced_with_its_mode_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(file) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("state.json", "old")]
    write_file(file, "new ☃", PRIVATE)
    assert file.read_text(encoding="utf-8") == "new ☃" and file.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


MAKES = """
from openhands_rl_plugin.core.files import temporary_folder
(made := temporary_folder("fork")).joinpath("copy").mkdir(mode=0)
print(made, flush=True)
input()
"""


def test_what_killed_processes_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    running: list[tuple[subprocess.Popen[str], Path]] = []
    environ, pipe = {**os.environ, "TMPDIR": str(tmp_path)}, subprocess.PIPE
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", MAKES], stdin=pipe, stdout=pipe, text=True, env=environ)
        assert process.stdout is not None
        running.append((process, Path(process.stdout.readline().strip())))
        if len(running) == 1:
            process.kill()
            process.wait()
    assert [folder.exists() for _, folder in running] == [False, True, True]
    for process, _ in running:
        process.communicate("\n")
    assert list(tmp_path.iterdir()) == []
