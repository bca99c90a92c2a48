"""Golden artefacts: what the package made of given inputs, kept as files; ``test_golden.py`` makes it again.

An artefact is a JSON value in ``NAME.json.zst``. ``differences.toml`` lists the fields that are different on purpose,
each with its reason; a golden file changes only in a commit that adds to that list. ``make.py`` writes the files.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from backports import zstd

HERE = Path(__file__).parent
HELPERS = HERE.parent / "helpers"


def path_of(name: str) -> Path:
    return HERE / f"{name}.json.zst"


def read(name: str) -> Any:
    return json.loads(zstd.decompress(path_of(name).read_bytes()))


def write(name: str, value: Any) -> None:
    path_of(name).write_bytes(zstd.compress(json.dumps(value, separators=(",", ":")).encode(), 19))


def run_script(script: str, *words: str) -> Any:
    """The JSON that a script of this folder prints as its last line, in a process of its own."""
    folders = [str(HERE), str(HELPERS), *(str(each) for each in HELPERS.iterdir() if each.is_dir())]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, HERE / script, *words], capture_output=True, text=True, env=environ, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def differences(name: str, golden: Any, today: Any, tolerance: float = 0.0) -> list[str]:
    """Where today's value is another one than the golden one, except where ``differences.toml`` says so."""
    listed = tomllib.loads((HERE / "differences.toml").read_text()).get("difference", [])
    found = _compared("", golden, json.loads(json.dumps(today)), tolerance)
    return [
        f"{path}: {one[:300]} | {other[:300]}"
        for path, one, other in ((path, str(one), str(other)) for path, one, other in found)
        if not any(each["artefact"] == name and _is_listed(each, path, one, other) for each in listed)
    ]


def _is_listed(difference: dict[str, str], path: str, golden: str, today: str) -> bool:
    values = {"field": path, "golden": golden, "today": today}
    return all(fnmatchcase(value, difference.get(key, "*")) for key, value in values.items())


def _compared(path: str, golden: Any, today: Any, tolerance: float) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(golden, dict) and isinstance(today, dict):
        for key in sorted({*golden, *today}):
            yield from _compared(f"{path}/{key}", golden.get(key), today.get(key), tolerance)
    elif isinstance(golden, list) and isinstance(today, list) and len(golden) == len(today):
        scale = max((abs(each) for each in golden if isinstance(each, float)), default=0.0)
        for at, (one, other) in enumerate(zip(golden, today, strict=True)):
            if not (isinstance(one, float) and isinstance(other, float) and abs(one - other) <= tolerance * scale):
                yield from _compared(f"{path}/{at}", one, other, tolerance)
    elif isinstance(golden, float) and isinstance(today, int | float):
        if not math.isclose(golden, today, rel_tol=tolerance, abs_tol=0.0):
            yield path, golden, today
    elif golden != today:
        yield path, golden, today
