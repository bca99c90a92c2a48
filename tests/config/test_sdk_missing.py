"""Importing the agent for OpenHands V1 where its SDK is absent or too old: one line with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

# What the settings need; nothing else of this environment can be imported.
PACKAGES = (
    *("pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "annotated_types"),
    "openhands_rl_plugin",
)


def bare(folder: Path, **versions: str) -> Path:
    """A folder of packages with these versions of OpenHands' packages, by their metadata."""
    installed, own = Path(pydantic.__file__).parents[1], Path(__file__).parents[2]
    for name in PACKAGES:
        for found in (own / name, installed / name, installed / f"{name}.py"):
            if found.exists():
                (folder / found.name).symlink_to(found)
                break
    for name, version in versions.items():
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "1.15 or newer (not installed)"),
        ({"openhands_sdk": "1.58.0"}, "openhands-tools 1.15 or newer (openhands-sdk 1.58.0 installed)"),
    ],
)
def test_one_line_with_the_remedy(tmp_path: Path, versions: dict[str, str], said: str) -> None:
    folder = bare(tmp_path, **versions)
    program = "import sys; sys.path.append(sys.argv[1]); from openhands_rl_plugin.hosts.v1 import RLAgent"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: OpenHands V1 needs"), done.stderr
    assert said in last and "pip install '.[sdk]'" in last
