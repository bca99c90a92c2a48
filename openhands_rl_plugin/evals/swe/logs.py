"""Files of a grading run, in the layout of the official tools:
``logs/run_evaluation/<run>/<model>/<instance>/{patch.diff,eval.sh,test_output.txt,report.json,run_instance.log}``.

In addition, ``verdict.json`` has the kind of verdict, which a report lacks. ``report.json`` exists only when the tests
finished, because the official tools count its absence as an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.swe.types import PatchVerdict, VerdictKind

_TESTED = (VerdictKind.RESOLVED, VerdictKind.UNRESOLVED)


class InstanceLogs:
    """The folder of one instance."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_patch(self, patch: str) -> None:
        """``patch.diff``, byte for byte; files of an earlier attempt are removed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("report.json", "verdict.json", "test_output.txt", "run_instance.log"):
            (self.folder / name).unlink(missing_ok=True)
        self._write("patch.diff", patch)

    def write_script(self, text: str) -> None:
        """``eval.sh``."""
        self._write("eval.sh", text)

    def write_test_output(self, text: str) -> None:
        """``test_output.txt``."""
        self._write("test_output.txt", text)

    def note(self, text: str) -> None:
        """A paragraph in ``run_instance.log``."""
        with open(self.folder / "run_instance.log", "a", encoding="utf-8", opener=_private) as file:
            file.write(redact_text(text).rstrip() + "\n\n")

    def write_verdict(self, verdict: PatchVerdict) -> None:
        """``verdict.json``, and ``report.json`` when the tests finished."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if verdict.kind in _TESTED:
            self._write("report.json", json.dumps(instance_report(verdict), indent=4))
        else:
            (self.folder / "report.json").unlink(missing_ok=True)
        self._write("verdict.json", verdict.model_dump_json(indent=1))

    def read_verdict(self) -> PatchVerdict | None:
        """The stored verdict; ``None`` without one, or for an incomplete file."""
        try:
            return PatchVerdict.model_validate_json((self.folder / "verdict.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def _write(self, name: str, text: str) -> None:
        write_file(self.folder / name, text.encode(errors="replace"), PRIVATE)


def instance_report(verdict: PatchVerdict) -> JsonObject:
    """``report.json`` of one tested patch."""
    nothing: JsonObject = {"success": [], "failure": []}
    return {
        verdict.instance_id: {
            "patch_is_None": False,
            "patch_exists": True,
            "patch_successfully_applied": True,
            "resolved": verdict.resolved,
            "tests_status": {
                "FAIL_TO_PASS": verdict.fail_to_pass.model_dump(mode="json"),
                "PASS_TO_PASS": verdict.pass_to_pass.model_dump(mode="json"),
                "FAIL_TO_FAIL": nothing,
                "PASS_TO_FAIL": nothing,
            },
        }
    }


def run_report(verdicts: Mapping[str, PatchVerdict], instances: list[str], submitted: list[str]) -> JsonObject:
    """The report of a run (schema version 2). In addition to the official fields: ids by kind of verdict."""
    kinds = {kind: sorted(name for name, each in verdicts.items() if each.kind is kind) for kind in VerdictKind}
    resolved, unresolved = kinds[VerdictKind.RESOLVED], kinds[VerdictKind.UNRESOLVED]
    failures = (VerdictKind.UNAPPLIED, VerdictKind.TIMED_OUT, VerdictKind.REFUSED, VerdictKind.INFRASTRUCTURE)
    errors = sorted(name for kind in failures for name in kinds[kind])
    ids: dict[str, list[str]] = {
        "completed_ids": sorted([*resolved, *unresolved]),
        "incomplete_ids": sorted({*instances} - {*verdicts}),
        "empty_patch_ids": kinds[VerdictKind.EMPTY_PATCH],
        "submitted_ids": sorted(submitted),
        "resolved_ids": resolved,
        "unresolved_ids": unresolved,
        "error_ids": errors,
    }
    flagged = sorted(name for name, each in verdicts.items() if each.flagged)
    more = {**{f"{kind.value}_ids": kinds[kind] for kind in failures}, "flagged_ids": flagged}
    return {
        "total_instances": len(instances),
        "submitted_instances": len(submitted),
        "completed_instances": len(ids["completed_ids"]),
        "resolved_instances": len(resolved),
        "unresolved_instances": len(unresolved),
        "empty_patch_instances": len(ids["empty_patch_ids"]),
        "error_instances": len(errors),
        **{name: list(value) for name, value in ids.items()},
        **{name: list(value) for name, value in more.items()},
        "schema_version": 2,
        "unstopped_instances": 0,
        "unstopped_containers": [],
        "unremoved_images": [],
    }


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
