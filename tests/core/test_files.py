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
print(made)
"""


def test_the_end_of_a_process_removes_its_temporary_folders(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", MAKES], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.startswith(str(tmp_path)) and list(tmp_path.iterdir()) == []
