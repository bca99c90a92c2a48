"""Layers of strangers: nothing is written outside, nothing gives rights, everything is bounded."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import threading
from pathlib import Path

import pytest
from made_images import PACKERS, Member, folder, hard_link, layer, sha256, symlink

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.evals.images.layers import ImageLimits, LayerFacts, assemble, read_facts, unpack_layer


def unpack(into: Path, data: bytes, *, packed: str = "", limits: ImageLimits | None = None) -> LayerFacts:
    into.mkdir()
    stream, stop = io.BytesIO(PACKERS[packed](data)), threading.Event()
    return unpack_layer(stream, into, sha256(data), limits or ImageLimits(), what="the layer", stop=stop)


def assembled(folder: Path, *layers: list[Member]) -> Path:
    places = []
    for number, members in enumerate(layers):
        places.append(folder / f"layer-{number}")
        unpack(places[-1], layer(members))
    assemble(places, folder / "root", stop=threading.Event())
    return folder / "root"


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize("packed", PACKERS)
def test_a_layer_is_unpacked_however_it_is_packed(tmp_path: Path, packed: str) -> None:
    data = layer([folder("./a"), Member("/a/run", b"x" * 3_000_000, mode=0o755), symlink("a/link", "run")])
    facts = unpack(tmp_path / "one", data, packed=packed)
    tree = tmp_path / "one" / "tree"
    assert (tree / "a/run").read_bytes() == b"x" * 3_000_000 and os.access(tree / "a/run", os.X_OK)
    assert os.readlink(tree / "a/link") == "run"
    assert (tree / "a/run").stat().st_mtime == (tree / "a").stat().st_mtime == 1_700_000_000
    assert (facts.size, facts.files) == (3_000_000, 3) and read_facts(tmp_path / "one") == facts


ESCAPES = {
    "above the root": [Member("../out", b"x")],
    "above the root, in the middle": [Member("a/../../out", b"x")],
    "through a link": [symlink("a", "{outside}"), Member("a/out", b"x")],
    "through a link to a folder": [symlink("a", "{outside}"), folder("a"), Member("a/out", b"x")],
    "through a link above it": [folder("d"), symlink("d/a", "../.."), Member("d/a/b/out", b"x")],
    "a hard link to the host": [hard_link("a", "{outside}/secret")],
    "a hard link above": [hard_link("a", "../../secret")],
    "a hard link through a link": [symlink("a", "{outside}"), hard_link("b", "a/secret")],
    "a whiteout of the folder above": [Member("d/.wh...", b"")],
    "a whiteout of nothing": [Member(".wh.", b"")],
    "a whiteout through a path": [Member("../.wh.out", b"")],
    "a file where the root is": [Member("./", b"x", kind=tarfile.REGTYPE)],
    "a folder that becomes a link": [folder("a"), symlink("a", "{outside}")],
    "a name without an end": [Member("n" * 300, b"x")],
    "a path without an end": [Member("/".join(["d"] * 3000), b"x")],
}


@pytest.mark.parametrize("how", ESCAPES)
def test_nothing_is_written_outside(tmp_path: Path, how: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("of the user")
    members = [each._replace(link=each.link.format(outside=outside)) for each in ESCAPES[how]]
    before = names(outside)
    with pytest.raises(BadEnvironmentError, match="the layer cannot be unpacked: "):
        unpack(tmp_path / "one", layer(members))
    assert names(outside) == before and (outside / "secret").read_text() == "of the user"
    assert (outside / "secret").stat().st_nlink == 1
    assert set(os.listdir(tmp_path)) == {"outside", "one"}


def test_a_link_in_a_files_place_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("of the user")
    unpack(tmp_path / "one", layer([symlink("a", str(tmp_path / "victim")), Member("a", b"new")]))
    assert (tmp_path / "victim").read_text() == "of the user"
    place = tmp_path / "one/tree/a"
    assert not place.is_symlink() and place.read_text() == "new"


def test_rights_and_devices_stay_outside(tmp_path: Path) -> None:
    given = {
        "user.note": "kept",
        "user.overlay.redirect": "/x",
        "security.capability": "x",
        "trusted.overlay.opaque": "y",
    }
    members = [
        Member("su", b"x", mode=0o6755, xattrs=given),
        folder("shared", mode=0o7777),
        Member("shared/closed", b"x", mode=0o000),
        Member("null", kind=tarfile.CHRTYPE),
        Member("disk", kind=tarfile.BLKTYPE),
        Member("pipe", kind=tarfile.FIFOTYPE),
    ]
    facts = unpack(tmp_path / "one", layer(members))
    tree = tmp_path / "one" / "tree"
    assert names(tree) == ["shared", "shared/closed", "su"] and facts.left_out == 3
    assert stat.S_IMODE((tree / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "shared").stat().st_mode) == 0o1777
    assert (tree / "shared/closed").read_text() == "x"
    assert set(os.listxattr(tree / "su")) <= {"user.note"}


@pytest.mark.parametrize(
    ("members", "limits"),
    [
        ([Member("zeros", bytes(5_000_000))], ImageLimits(size=1_000_000)),
        ([Member("zeros", bytes(5_000_000))], ImageLimits(file=1_000_000)),
        ([Member(f"file-{number}", b"x") for number in range(200)], ImageLimits(files=100)),
    ],
)
@pytest.mark.parametrize("packed", ["+gzip", "+zstd"])
def test_bombs_are_bounded(tmp_path: Path, members: list[Member], limits: ImageLimits, packed: str) -> None:
    with pytest.raises(ConfigError, match="larger than an image may be; --max-image-size allows more"):
        unpack(tmp_path / "one", layer(members), packed=packed, limits=limits)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2_000_000


def test_headers_are_bounded(tmp_path: Path) -> None:
    data = layer([Member("a", b"", xattrs={"user.a": "x" * 5_000_000})])
    with pytest.raises(BadEnvironmentError, match="its headers are too large"):
        unpack(tmp_path / "one", data)
    sparse = tarfile.TarInfo("huge")
    sparse.type, sparse.size = tarfile.REGTYPE, 0
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**40)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(sparse)
    with pytest.raises(BadEnvironmentError, match="sparse"):
        unpack(tmp_path / "two", out.getvalue())


@pytest.mark.parametrize("packed", PACKERS)
def test_damage_is_found(tmp_path: Path, packed: str) -> None:
    data = layer([Member("a", b"x" * 100_000), Member("b", os.urandom(10_000))])
    cut = PACKERS[packed](data)[:-5_000] if packed else data[:60_000]
    other = PACKERS[packed](layer([Member("a", b"y")]))
    for number, stream in enumerate((cut, other, b"", b"no archive at all" * 100)):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(BadEnvironmentError):
            unpack_layer(
                io.BytesIO(stream),
                tmp_path / str(number),
                sha256(data),
                ImageLimits(),
                what="the layer",
                stop=threading.Event(),
            )


def test_unpacking_can_be_stopped(tmp_path: Path) -> None:
    stop, data = threading.Event(), layer([Member("a", b"x")])
    stop.set()
    with pytest.raises(InfrastructureError, match="cancelled"):
        unpack_layer(io.BytesIO(data), tmp_path, sha256(data), ImageLimits(), what="the layer", stop=stop)


def test_upper_layers_remove_and_replace(tmp_path: Path) -> None:
    root = assembled(
        tmp_path,
        [
            Member("a/one", b"1"),
            Member("a/two", b"2"),
            Member("b/deep/file", b"3"),
            symlink("c", "a"),
            Member("d", b"4"),
        ],
        [Member("a/.wh.one"), Member("b/.wh..wh..opq"), Member("b/new", b"5"), Member(".wh.absent"), folder("d")],
        [Member("c/inside", b"6"), Member("a/two", b"7", mode=0o755), Member(".wh..wh.plnk", b"")],
    )
    assert names(root) == ["a", "a/two", "b", "b/new", "c", "c/inside", "d"]
    assert (root / "a/two").read_text() == "7" and not (root / "c").is_symlink()
    assert (tmp_path / "layer-0/tree/a/two").read_text() == "2"


def test_whiteouts_follow_no_link_of_a_lower_layer(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("of the user")
    lower = [symlink("a", str(victim)), symlink("b", str(victim)), symlink("link", str(victim / "file"))]
    root = assembled(tmp_path, lower, [Member("a/.wh.file"), Member("b/.wh..wh..opq"), Member("link", b"new")])
    assert (victim / "file").read_text() == "of the user"
    assert (root / "link").read_text() == "new" and not (root / "link").is_symlink()


def test_a_whiteout_is_for_layers_below_only(tmp_path: Path) -> None:
    root = assembled(tmp_path, [Member("a", b"old")], [Member("a", b"new"), Member(".wh.a"), Member(".wh..wh..opq")])
    assert names(root) == ["a"] and (root / "a").read_text() == "new"


def test_hard_links_stay_one_file(tmp_path: Path) -> None:
    root = assembled(tmp_path, [Member("a/one", b"x"), hard_link("two", "a/one"), hard_link("/three", "./two")])
    assert (root / "a/one").stat().st_ino == (root / "two").stat().st_ino == (root / "three").stat().st_ino


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \n\x1b[31m")
    root = assembled(tmp_path, [Member(name, b"x"), Member("kept", b"x")], [Member(f".wh.{name}")])
    assert names(root) == ["kept"]
