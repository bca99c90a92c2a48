"""The Docker back end against a real engine: cheats and honest patches as in the sandbox, and engines that fail.

``make test-containers`` finds or starts the engine. Images are made here; nothing is pulled.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import ATTACKS, CONTAIN_THE_RESULT
from image_samples import import_image, instance_linux
from pytest_sample import make_pytest_sample
from repository_samples import FILES, FIX, NOTHING, Sample, git, needs_sandbox, with_extra

from openhands_rl_plugin.evals.swe.backends import DockerBackend, LocalBackend
from openhands_rl_plugin.evals.swe.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.swe.recipes import parse_pytest

PROGRAM = os.environ.get("OPENHANDS_RL_CONTAINER_PROGRAM", "")

pytestmark = [
    pytest.mark.slow,
    needs_sandbox,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PROGRAM, reason="no container engine is named; make test-containers finds one"),
]


class Both:
    """The small repository in a sandbox and in a container."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self.local = LocalBackend(cache=folder / "cache", mirror=sample.mirror, guard=RewardHackGuard())
        self.docker = DockerBackend(program=PROGRAM, guard=RewardHackGuard())
        self.row = sample.instance
        self.root = folder / "root"
        self.name = f"localhost/openhands-rl/{self.row.instance_id}:latest"

    async def image(self) -> Instance:
        """The row with its image, which is made the first time."""
        if not self.root.exists():
            instance_linux(self.root, await self.local.prepare(self.row))
            import_image(PROGRAM, self.root, self.name)
        return with_extra(self.row, image=self.name)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("calc")
    sample = make_pytest_sample(folder)
    # A name of this run's own: an image is of one commit.
    row = sample.instance.model_copy(update={"instance_id": f"someone__calc-{os.getpid()}"})
    made = Both(sample._replace(instance=row), folder)
    yield made
    subprocess.run([PROGRAM, "image", "rm", "--force", made.name])


def outcomes(verdict: PatchVerdict) -> dict[str, str]:
    log = Path(verdict.logs or "", "test_output.txt")
    return parse_pytest(log.read_text()) if log.exists() else {}


PATCHES = {"the fix": FIX, "nothing": NOTHING, "empty": ""} | {each.name: each.patch() for each in ATTACKS}


@pytest.mark.parametrize("name", PATCHES)
async def test_a_container_reports_what_the_sandbox_reports(both: Both, tmp_path: Path, name: str) -> None:
    row, patch = await both.image(), PATCHES[name]
    here = await both.local.grade(both.row, patch, logs=tmp_path / "local", timeout=60.0)
    there = await both.docker.grade(row, patch, logs=tmp_path / "docker", timeout=60.0)
    assert (there.kind, there.flagged) == (here.kind, here.flagged), (there, here)
    assert outcomes(there) == outcomes(here)
    assert (here.kind is VerdictKind.RESOLVED) is (name == "the fix" or name in CONTAIN_THE_RESULT)


async def test_tests_that_end_their_container_are_unresolved(both: Both, tmp_path: Path) -> None:
    row = with_extra(await both.image(), test_command="pkill -9 sleep; sleep 30")
    verdict = await both.docker.grade(row, FIX, logs=tmp_path, timeout=60.0)
    assert verdict.kind is VerdictKind.UNRESOLVED and "the run ended before its tests did" in verdict.reason


async def test_a_checkout_is_copied_out_of_the_image(both: Both, tmp_path: Path) -> None:
    checkout = await both.docker.checkout(await both.image(), tmp_path / "work")
    folder = checkout.root / checkout.repository
    assert git(folder, "status", "--porcelain") == ""
    assert (folder / "calc.py").read_text() == FILES["calc.py"]
    assert os.path.lexists(checkout.mounts[0].host / "bin" / "python")
