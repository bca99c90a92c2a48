"""Verdicts of ``openhands-rl grade`` with the local back end on the laptop suite: golds, and patches that are none.

The rows are kept (``swe_local_rows``), so that their file may move. Environments come from the package index once and
are kept in ``OPENHANDS_RL_SWE_CACHE``.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from golden import read

from openhands_rl_plugin import cli


def added(path: str, *lines: str) -> str:
    text = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{text}"


HOOK = (
    "import pytest",
    "@pytest.hookimpl(hookwrapper=True)",
    "def pytest_runtest_makereport(item, call):",
    "    report = (yield).get_result()",
    "    report.outcome = 'passed'",
)
NOT_GOLD = {
    "nothing": added("no_op.txt", "Nothing is changed."),
    "a hook": added("conftest.py", *HOOK),
    "an exit": added("sitecustomize.py", "import os, atexit", "atexit.register(os._exit, 0)"),
    "empty": "",
    "words": "I would change the comparison.\n",
    "another file": "diff --git a/no/such.py b/no/such.py\n--- a/no/such.py\n+++ b/no/such.py\n@@ -1 +1 @@\n-a\n+b\n",
}


def predictions(rows: list[Any]) -> list[Any]:
    """Two of three rows have their own patch, the third one of the others."""
    made = []
    for at, row in enumerate(rows):
        kind = "gold" if at % 3 else list(NOT_GOLD)[at // 3 % len(NOT_GOLD)]
        made.append({"instance_id": row["instance_id"], "kind": kind, "model_patch": NOT_GOLD.get(kind, row["patch"])})
    return made


def grade() -> Any:
    rows = read("swe_local_rows")
    given = predictions(rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked = [{"model_name_or_path": "m", **{k: each[k] for k in ("instance_id", "model_patch")}} for each in given]
        (folder / "predictions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
        words = ["--instances", str(folder / "rows.jsonl"), "--out", str(folder / "graded")]
        cache = ["--backend", "local", "--cache", os.environ["OPENHANDS_RL_SWE_CACHE"]]
        assert cli.main(["grade", str(folder / "predictions.jsonl"), *words, *cache]) == 0
        found = [json.loads(file.read_text()) for file in (folder / "graded").rglob("verdict.json")]
    verdicts = {each["instance_id"]: outcome(each) for each in found}
    return {each["instance_id"]: {"patch": each["kind"], **verdicts.get(each["instance_id"], {})} for each in given}


def outcome(verdict: dict[str, Any]) -> dict[str, Any]:
    flags = sorted({f"{flag['rule']}: {flag['severity']}" for flag in verdict["flags"]})
    tests = {
        name: {way: sorted(verdict[name][way]) for way in verdict[name]} for name in ("fail_to_pass", "pass_to_pass")
    }
    return {"kind": verdict["kind"], "flags": flags, **tests}
