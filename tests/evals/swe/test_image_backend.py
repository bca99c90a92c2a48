"""``--backend image``: instances graded in images that are made here, from a file to the verdict."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from made_images import folder, layer, linux_layer, make_image, oci_files, repository_layer, symlink, write_archive
from made_sif import Described, settings, sif, squashfs, unpacked
from registry_stub import stub_registry
from repository_samples import FIX, NOTHING, Sample, git, make_sample, needs_sandbox, with_extra

from openhands_rl_plugin import cli
from openhands_rl_plugin.evals.images.finding import ImageFinder
from openhands_rl_plugin.evals.images.store import ImageStore
from openhands_rl_plugin.evals.swe.backends.image import ImageBackend
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceLimits
from openhands_rl_plugin.evals.swe.dataset import row_of
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import Instance, VerdictKind

pytestmark = needs_sandbox
NAME = "someone/calc:1"


class Place(NamedTuple):
    """The sample's row with an image, which lies as an archive in ``images``; the cache is shared by this file."""

    sample: Sample
    row: Instance
    images: Path
    cache: Path

    def backend(self, **settings) -> ImageBackend:
        finder = ImageFinder(ImageStore(self.cache / "images"), place=self.images)
        return ImageBackend(finder, mirror=self.sample.mirror, guard=RewardHackGuard(), **settings)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("image")
    sample = make_sample(base)
    clone = base / "clone"
    git(base, "clone", "--quiet", str(sample.mirror / "someone__calc.git"), str(clone))
    git(clone, "reset", "--quiet", "--hard", sample.instance.base_commit)
    (base / "images").mkdir()
    settings = {"Env": ["PATH=/usr/bin:/bin", "MARK=of the image"], "WorkingDir": "/testbed"}
    image = make_image([linux_layer(), repository_layer(clone)], packed="", **settings)
    write_archive(base / "images" / "calc_1.tar", oci_files(image))
    return Place(sample, with_extra(sample.instance, image=NAME), base / "images", base / "cache")


@pytest.mark.parametrize(
    ("patch", "kind"),
    [(FIX, VerdictKind.RESOLVED), (NOTHING, VerdictKind.UNRESOLVED), ("", VerdictKind.EMPTY_PATCH)],
)
async def test_a_patch_is_graded_in_its_image(place: Place, tmp_path: Path, patch: str, kind: VerdictKind) -> None:
    backend = place.backend()
    await backend.check()
    verdict = await backend.grade(place.row, patch, logs=tmp_path, timeout=60.0)
    assert verdict.kind is kind, verdict
    runs = ImageStore(place.cache / "images").runs
    assert not list(runs.iterdir())
    assert not subprocess.run(["pgrep", "-f", str(runs)], capture_output=True).stdout


async def test_a_patch_is_graded_in_a_sif(place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clone = place.images.parent / "clone"
    members = [*unpacked(linux_layer()), *unpacked(repository_layer(clone))]
    own = json.dumps({"Env": ["PATH=/usr/bin:/bin", "MARK=of the image"], "WorkingDir": "/testbed", "User": "worker"})
    (tmp_path / "calc_1.sif").write_bytes(sif(settings(own.encode()), Described(squashfs(members))))
    finder = ImageFinder(ImageStore(tmp_path / "cache" / "images"), place=tmp_path)
    backend = ImageBackend(finder, mirror=place.sample.mirror, guard=RewardHackGuard())
    for patch, kind in ((FIX, VerdictKind.RESOLVED), (NOTHING, VerdictKind.UNRESOLVED)):
        verdict = await backend.grade(place.row, patch, logs=tmp_path / "logs", timeout=60.0)
        assert verdict.kind is kind, verdict
    words = ["images", "run", "--cache", str(tmp_path / "cache"), NAME, "sh", "-c", "echo $MARK $(pwd) $(id -u)"]
    assert await asyncio.to_thread(cli.main, words) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "of the image /testbed 1234"


async def test_each_patch_has_files_of_its_own(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.row, test_command="echo $MARK; ls / >/made; rm -rf /usr/bin/find; python run_tests.py")
    for _ in range(2):
        verdict = await place.backend().grade(row, FIX, logs=tmp_path / "logs", timeout=60.0)
        assert verdict.resolved, verdict
    said = (tmp_path / "logs" / "test_output.txt").read_text()
    assert "of the image" in said
    assert "writable layer: " in (tmp_path / "logs" / "run_instance.log").read_text()
    (image,) = ImageStore(place.cache / "images").images()
    assert (image.root / "usr/bin/find").exists() and not (image.root / "made").exists()


async def test_where_no_overlay_can_be_made_files_are_copied(place: Place, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("openhands_rl_plugin.evals.images.sandbox.can_overlay", lambda *places: False)
    row = with_extra(place.row, test_command="rm -rf /usr/bin/find; python run_tests.py")
    verdict = await place.backend().grade(row, FIX, logs=tmp_path, timeout=60.0)
    assert verdict.resolved, verdict
    assert "writable layer: copy" in (tmp_path / "run_instance.log").read_text()
    (image,) = ImageStore(place.cache / "images").images()
    assert (image.root / "usr/bin/find").exists()


async def test_tests_see_nothing_of_the_user(place: Place, tmp_path: Path, monkeypatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    monkeypatch.setenv("OF_THE_USER", "of the user")
    look = f"cat {secret}; env; ls -a / /root /home /proc/1/root/; id -u; python run_tests.py"
    verdict = await place.backend().grade(
        with_extra(place.row, test_command=look), FIX, logs=tmp_path / "logs", timeout=60.0
    )
    said = (tmp_path / "logs" / "test_output.txt").read_text()
    assert verdict.resolved and "of the user" not in said.replace(look, "") and "OF_THE_USER" not in said
    assert str(place.cache) not in said


async def test_a_checkout_is_copied_out_of_the_image(place: Place, tmp_path: Path) -> None:
    checkout = await place.backend().checkout(place.row, tmp_path / "work")
    assert git(checkout.directory, "status", "--porcelain") == ""
    (checkout.directory / "calc.py").write_text("changed\n")
    (image,) = ImageStore(place.cache / "images").images()
    assert (image.root / "testbed/calc.py").read_text() != "changed\n"
    assert os.path.lexists(checkout.mounts[0].host / "bin" / "python")


async def test_an_image_that_leads_elsewhere_shows_nothing_of_the_host(place: Place, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("of the user")
    wrong = make_image([layer([symlink("testbed", str(tmp_path / "home"))])])
    write_archive(tmp_path / "calc.tar", oci_files(wrong))
    backend = ImageBackend(ImageFinder(ImageStore(tmp_path / "cache"), place=tmp_path))
    verdict = await backend.grade(place.row, FIX, logs=tmp_path / "logs", timeout=60.0)
    assert verdict.kind is VerdictKind.INFRASTRUCTURE and "has no folder /testbed" in verdict.reason


async def test_places_of_mounts_that_are_links_are_not_followed(place: Place, tmp_path: Path) -> None:
    image = await ImageFinder(ImageStore(place.cache / "images"), place=place.images).find(NAME)
    outside = f"/oldroot{tmp_path}/made"
    links = [symlink(name, outside) for name in ("eval.sh", "guard", "guard-out", "dev", "proc", "run")]
    layers = [linux_layer(), repository_layer(image.root / "testbed")]
    whole = make_image([*layers, layer([*links, symlink("etc/hosts", outside)])], packed="")
    write_archive(tmp_path / "calc.tar", oci_files(whole))
    hostile = ImageBackend(ImageFinder(ImageStore(place.cache / "images"), place=tmp_path), guard=RewardHackGuard())
    verdict = await hostile.grade(place.row, FIX, logs=tmp_path / "logs", timeout=60.0)
    assert verdict.resolved, verdict
    assert not os.path.lexists(tmp_path / "made")


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
    words += ["--cache", str(place.cache)]
    assert cli.main([*words, "--images", str(place.images)]) == 0
    assert capsys.readouterr().out.startswith("1 resolved")
    assert cli.main([*words, "--images", "/no/such/folder"]) == 1
    assert "error: --images /no/such/folder: no such folder" in capsys.readouterr().err


async def test_an_image_of_a_registry_is_graded_in(place: Place, tmp_path: Path) -> None:
    with stub_registry() as registry:
        image = await ImageFinder(ImageStore(place.cache / "images"), place=place.images).find(NAME)
        layers = [linux_layer(), repository_layer(image.root / "testbed")]
        registry.add("someone/calc", "2", make_image(layers, packed="+zstd"))
        row = with_extra(place.row, image="someone/calc:2")
        finder = ImageFinder(ImageStore(place.cache / "images"), registry=registry.address)
        verdict = await ImageBackend(finder, guard=RewardHackGuard()).grade(row, FIX, logs=tmp_path, timeout=60.0)
        assert verdict.resolved, verdict
        missing = await ImageBackend(finder).grade(with_extra(place.row, image="a/b"), FIX, logs=tmp_path, timeout=60.0)
    assert missing.kind is VerdictKind.INFRASTRUCTURE
    assert missing.reason == f"{registry.address} has no image docker.io/a/b:latest"
    none = await ImageBackend(finder).grade(place.sample.instance, FIX, logs=tmp_path, timeout=60.0)
    assert none.reason.endswith("its row names no image; use --backend local")


def test_a_command_in_an_image(place: Place, tmp_path: Path, capfd) -> None:
    config = {"Env": ["PATH=/usr/bin:/bin", "MARK=of the image"], "WorkingDir": "/testbed", "User": "worker"}
    image = make_image([linux_layer(), layer([folder("testbed")])], packed="", Cmd=["pwd"], **config)
    path = write_archive(tmp_path / "a.tar", oci_files(image))
    where = ["--cache", str(place.cache)]
    assert cli.main(["images", "pull", str(path), "--name", "someone/own", *where]) == 0
    capfd.readouterr()
    look = "ls /testbed /tmp; id -u; pwd; echo $MARK $HOME; exit 7"
    for _ in range(2):
        made = ["someone/own", "--", "sh", "-c", f"{look.replace('exit', 'touch /testbed/made /tmp/made; exit')}"]
        assert cli.main(["images", "run", *where, *made]) == 7
        said = capfd.readouterr().out
        assert said == "/testbed:\n\n/tmp:\n1234\n/testbed\nof the image /home/worker\n"
    assert cli.main(["images", "run", *where, "someone/own"]) == 0
    assert capfd.readouterr().out == "/testbed\n"
    assert cli.main(["images", "run", *where, "--workdir", "/new/folder", "someone/own"]) == 0
    assert capfd.readouterr().out == "/new/folder\n"
    assert cli.main(["images", "run", *where, "--user", "nobody-knows", "someone/own", "pwd"]) == 1
    assert "is not in its /etc/passwd" in capfd.readouterr().err
