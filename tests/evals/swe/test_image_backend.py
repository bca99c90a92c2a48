"""``--backend image``: instances graded in an image that is made here by umoci, from the file to the verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from image_samples import PYTHON, small_linux
from repository_samples import FIX, NOTHING, git, make_sample, needs_sandbox, with_extra

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.backends.image import ImageBackend
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceLimits
from openhands_rl_plugin.evals.swe.dataset import row_of
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import Instance, VerdictKind

NAME = "someone/calc:1"
ACTIVATE = (
    'conda() { export CONDA_PREFIX=/opt/miniconda3/envs/testbed PATH="/opt/miniconda3/envs/testbed/bin:$PATH"; }\n'
)

pytestmark = [
    needs_sandbox,
    pytest.mark.skipif(not (shutil.which("skopeo") and shutil.which("umoci")), reason="needs skopeo and umoci"),
]


def make_image(layout: Path, bundle: Path, fill: Callable[[Path], None]) -> None:
    """An OCI layout with one image."""
    image = ["--image", f"{layout}:{NAME}"]

    def umoci(*words: str) -> None:
        subprocess.run(["umoci", *words], check=True, capture_output=True)

    umoci("init", "--layout", str(layout))
    umoci("new", *image)
    umoci("unpack", "--rootless", *image, str(bundle))
    fill(bundle / "rootfs")
    umoci("repack", *image, str(bundle))
    umoci("config", *image, "--config.env", "MARK=of the image")
    shutil.rmtree(bundle)


class Place(NamedTuple):
    """The sample's row with an image, which lies in a layout; the cache is shared by this file."""

    row: Instance
    source: str
    cache: Path

    def backend(self, **settings) -> ImageBackend:
        return ImageBackend(self.cache, source=self.source, guard=RewardHackGuard(), **settings)

    @property
    def root(self) -> Path:
        (found,) = (self.cache / "images").glob("*/bundle/rootfs")
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("image")
    sample = make_sample(base)
    clone, layout = base / "clone", base / "layout"
    git(base, "clone", "--quiet", str(sample.mirror / "someone__calc.git"), str(clone))
    git(clone, "reset", "--quiet", "--hard", sample.instance.base_commit)

    def fill(root: Path) -> None:
        small_linux(root)
        shutil.copytree(clone, root / "testbed", symlinks=True)
        conda = root / "opt/miniconda3"
        for folder in ("bin", "envs/testbed/bin"):
            (conda / folder).mkdir(parents=True)
        (conda / "bin/activate").write_text(ACTIVATE)
        (conda / "envs/testbed/bin/python").symlink_to(PYTHON)

    make_image(layout, base / "bundle", fill)
    return Place(with_extra(sample.instance, image=NAME), f"oci:{layout}:", base / "cache")


@pytest.mark.parametrize(
    ("patch", "kind"), [(FIX, VerdictKind.RESOLVED), (NOTHING, VerdictKind.UNRESOLVED), ("", VerdictKind.EMPTY_PATCH)]
)
async def test_a_patch_is_graded_in_its_image(place: Place, tmp_path: Path, patch: str, kind: VerdictKind) -> None:
    backend = place.backend()
    await backend.check()
    verdict = await backend.grade(place.row, patch, logs=tmp_path, timeout=60.0)
    assert verdict.kind is kind, verdict
    assert not list((place.cache / "image-runs").iterdir())


@pytest.mark.parametrize("overlay", [True, False])
async def test_each_patch_has_files_of_its_own(place: Place, tmp_path: Path, monkeypatch, overlay: bool) -> None:
    if not overlay:
        monkeypatch.setattr("openhands_rl_plugin.evals.swe.backends.sandbox.can_overlay", lambda *places: False)
    row = with_extra(place.row, test_command="echo $MARK; ls / >/made; rm -rf /usr/bin/find; python run_tests.py")
    for _ in range(2):
        verdict = await place.backend().grade(row, FIX, logs=tmp_path / "logs", timeout=60.0)
        assert verdict.resolved, verdict
    assert "of the image" in (tmp_path / "logs" / "test_output.txt").read_text()
    assert (place.root / "usr/bin/find").exists() and not (place.root / "made").exists()


async def test_tests_see_nothing_of_the_user(place: Place, tmp_path: Path, monkeypatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    monkeypatch.setenv("OF_THE_USER", "of the user")
    look = f"cat {secret}; env; ls -a / /root /home /proc/1/root/; id -u; python run_tests.py"
    row = with_extra(place.row, test_command=look)
    verdict = await place.backend().grade(row, FIX, logs=tmp_path / "logs", timeout=60.0)
    said = (tmp_path / "logs" / "test_output.txt").read_text()
    assert verdict.resolved and "of the user" not in said.replace(look, "") and "OF_THE_USER" not in said
    assert str(place.cache) not in said


async def test_a_checkout_is_copied_out_of_the_image(place: Place, tmp_path: Path) -> None:
    checkout = await place.backend().checkout(place.row, tmp_path / "work")
    assert git(checkout.directory, "status", "--porcelain") == ""
    (checkout.directory / "calc.py").write_text("changed\n")
    assert (place.root / "testbed/calc.py").read_text() != "changed\n"
    assert os.path.lexists(checkout.mounts[0].host / "bin" / "python")


@pytest.mark.parametrize(("name", "said"), [("testbed", "has no folder /testbed"), ("etc/hosts", "must be no link")])
async def test_links_of_an_image_never_lead_to_the_host(place: Place, tmp_path: Path, name: str, said: str) -> None:
    def hostile(root: Path) -> None:
        (root / name).symlink_to(tmp_path)

    make_image(tmp_path / "layout", tmp_path / "bundle", hostile)
    backend = ImageBackend(tmp_path / "cache", source=f"oci:{tmp_path}/layout:")
    verdict = await backend.grade(place.row, FIX, logs=tmp_path / "logs", timeout=60.0)
    assert verdict.kind is VerdictKind.INFRASTRUCTURE and said in verdict.reason


async def test_what_goes_beyond_a_bound_is_ended(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.row, test_command="for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 60 & done; wait")
    backend = place.backend(limits=InstanceLimits(processes=8))
    verdict = await backend.grade(row, FIX, logs=tmp_path, timeout=50.0)
    assert verdict.kind is VerdictKind.UNRESOLVED and "the run ended before its tests did" in verdict.reason
    assert "more than 8 processes" in (tmp_path / "test_output.txt").read_text()


def test_grade_by_the_command_line(place: Place, tmp_path: Path, capsys) -> None:
    rows, predictions = tmp_path / "rows.jsonl", tmp_path / "predictions.jsonl"
    rows.write_text(json.dumps(row_of(place.row)) + "\n")
    predictions.write_text(json.dumps({"instance_id": place.row.instance_id, "model_patch": FIX}) + "\n")
    words = ["grade", str(predictions), "--instances", str(rows), "--out", str(tmp_path / "out"), "--backend", "image"]
    assert cli.main([*words, "--cache", str(place.cache), "--images", place.source]) == 0
    assert capsys.readouterr().out.startswith("1 resolved")


async def test_an_image_that_is_not_there_is_infrastructure(place: Place, tmp_path: Path) -> None:
    backend = place.backend()
    missing = await backend.grade(with_extra(place.row, image="a/b"), FIX, logs=tmp_path, timeout=60.0)
    assert missing.kind is VerdictKind.INFRASTRUCTURE and missing.reason.startswith("get a/b: ")


async def test_what_is_not_installed_is_one_line(place: Place, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs skopeo and umoci: apt-get install .* or use --backend docker"):
        await place.backend().check()
