"""What surrounds a run of tests: addresses that never answer, and a time limit that leaves out what is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository_samples import FIX, make_sample, needs_sandbox, with_extra

from openhands_rl_plugin.environments.workspace.processes import Prelude, run
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.types import VerdictKind

CONNECT = """\
import re, socket, sys

def tried(address):
    try:
        socket.create_connection((address, 80), timeout=0.5)
    except OSError as error:
        return "OSError" if isinstance(error, socket.gaierror) else type(error).__name__

capabilities = re.findall(r"Cap(?:Inh|Prm|Eff|Bnd|Amb):\\s*(\\w+)", open("/proc/self/status").read())
allowed = any(int(each, 16) >> 12 & 1 for each in capabilities)
found = tried("10.255.255.1"), tried("httpbin.org")
print("PASSED" if str(found) == sys.argv[1] else "FAILED", "tests/test_calc.py::test_add")
print("PASSED" if tried("10.255.255.2") == "OSError" and not allowed else "FAILED", "tests/test_calc.py::test_double")
"""


@needs_sandbox
@pytest.mark.parametrize(("repo", "error"), [("psf/requests", ("TimeoutError", None)), ("someone/calc", ("OSError", "OSError"))])
async def test_an_unreachable_address_is_waited_for_in_vain(tmp_path: Path, repo: str, error: tuple) -> None:
    sample = make_sample(tmp_path)
    for mirror in sample.mirror.iterdir():
        mirror.rename(mirror.with_name(f"{repo.replace('/', '__')}.git"))
    backend = LocalBackend(cache=tmp_path / "cache", sources=[MirrorSource(sample.mirror)])
    command = f"python - \"{error}\" <<'END'\n{CONNECT}END"
    row = with_extra(sample.instance, test_command=command).model_copy(update={"repo": repo})
    verdict = await backend.grade(row, FIX, logs=tmp_path / "logs", timeout=30.0)
    assert verdict.kind is VerdictKind.RESOLVED, (tmp_path / "logs" / "test_output.txt").read_text()


@pytest.mark.parametrize(
    ("script", "late"),
    [
        ("sleep 0.8; printf MA; printf 'RK\\n'; sleep 0.1", False),
        ("echo MARK; sleep 20", True),
        ("sleep 20; echo MARK", True),
    ],
)
async def test_a_limit_counts_from_the_end_of_the_prelude(script: str, late: bool) -> None:
    ended = await run(["sh", "-c", script], timeout=0.5, prelude=Prelude(b"MARK", 1.5))
    assert ended.timed_out is late and ended.seconds < 5
