"""``.sif`` files: those of the real tools, the test writer's, damaged ones and hostile ones."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from threading import Event

import pytest
from made_images import Member, folder, sha256, symlink
from made_sif import BLOCK, LOOP, REAL, SIFS, Described, settings, sif, squashfs

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.evals.images.finding import ImageFinder
from openhands_rl_plugin.evals.images.layers import ImageLimits, unpack_layer
from openhands_rl_plugin.evals.images.manifests import Platform
from openhands_rl_plugin.evals.images.store import ImageStore, StoredImage

LINUX = Platform(architecture="amd64")


async def from_file(path: Path, cache: Path, limits: ImageLimits | None = None) -> StoredImage:
    return await ImageFinder(ImageStore(cache, limits), LINUX).from_file(path)


def written(path: Path, *members: Member) -> Path:
    path.write_bytes(sif(settings(), Described(squashfs(members))))
    return path


@pytest.mark.parametrize("kind", ["gzip", "xz", "zstd"])
async def test_what_the_real_tools_wrote(tmp_path: Path, kind: str) -> None:
    image = await from_file(SIFS / f"{kind}.sif", tmp_path / "cache")
    config, root = image.config, image.root
    assert (config.env, config.workdir, config.user) == ({"PATH": "/usr/bin:/bin", "A": "1"}, "/usr", "worker")
    assert config.command == ("/bin/sh",) and config.platform == "linux/amd64"
    for name, content in REAL.items():
        assert (root / name).read_bytes() == content
    assert {path.name: path.read_text() for path in (root / "usr/many").iterdir()} == {
        str(number): f"file {number}\n" for number in range(300)
    }
    assert (os.readlink(root / "usr/link"), os.readlink(root / "out")) == ("../etc/passwd", "/etc/shadow")
    # Three of the image, and as many of its layer.
    assert (root / "usr/same").stat().st_ino == (root / "usr/words").stat().st_ino
    assert stat.S_IMODE((root / "usr/rights").stat().st_mode) == 0o755
    assert not {"null", "pipe"} & set(os.listdir(root))
    assert (root / "usr/words").stat().st_mtime == root.stat().st_mtime == 1_700_000_000
    assert not list(ImageStore(tmp_path / "cache").scratch.iterdir())


async def test_a_compression_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironmentError, match=r"lz4\.sif\) is compressed by lz4, .*; gzip, xz and zstd can"):
        await from_file(SIFS / "lz4.sif", tmp_path / "cache")


async def test_an_image_without_the_settings_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "own.sif").write_bytes(sif(Described(squashfs([Member("own", b"1" * (2 * BLOCK + 1))]))))
    image = await from_file(tmp_path / "own.sif", tmp_path / "cache")
    assert (image.config.env, image.config.workdir, image.config.command) == ({}, "/", ())
    assert (image.root / "own").read_bytes() == b"1" * (2 * BLOCK + 1)
    again = await from_file(shutil.copy(tmp_path / "own.sif", tmp_path / "copy.sif"), tmp_path / "cache")
    assert again.id == image.id and len(ImageStore(tmp_path / "cache").images()) == 1


async def test_a_folder_of_sifs_is_one_of_images(tmp_path: Path) -> None:
    """By the names that ``apptainer pull`` gives them."""
    written(tmp_path / "sweb.eval.x86_64.a_1776_b-1_latest.sif", Member("own", b"1"))
    finder = ImageFinder(ImageStore(tmp_path / "cache"), LINUX, place=tmp_path)
    image = await finder.find("swebench/sweb.eval.x86_64.a_1776_b-1:latest")
    assert (image.root / "own").read_bytes() == b"1"


def partition(system: int = 1, role: int = 2, architecture: bytes = b"02\0") -> bytes:
    return struct.pack("<ii3s", system, role, architecture)


SMALL = squashfs([Member("a", b"x" * 5000), folder("d"), symlink("d/link", "../a")])
REFUSED: dict[str, tuple[bytes, str]] = {
    "cut in the header": (sif(Described(SMALL))[:100], "it is cut"),
    "cut in the table": (sif(Described(SMALL))[:9000], "table of descriptors is not in the file"),
    "cut in the partition": (sif(Described(SMALL))[:-100], "a descriptor leads out of the file"),
    "another version": (sif(Described(SMALL), version=b"02\0"), "not of version 01"),
    "a table behind the end": (sif(Described(SMALL), offset=2**62), "table of descriptors is not in the file"),
    "a table before the beginning": (sif(Described(SMALL), offset=-4096), "table of descriptors is not in the file"),
    "more descriptors than there is room for": (sif(Described(SMALL), total=4000), "is not in the file"),
    "as many descriptors as a number can say": (sif(Described(SMALL), total=2**62), "is not in the file"),
    "a partition behind the end": (sif(Described(SMALL, offset=2**62)), "leads out of the file"),
    "a partition before the beginning": (sif(Described(SMALL, offset=-1)), "leads out of the file"),
    "a partition that is too long": (sif(Described(SMALL, size=2**62)), "leads out of the file"),
    "a partition of a negative size": (sif(Described(SMALL, size=-1)), "leads out of the file"),
    "no partition": (sif(settings()), "it has 0 primary partitions"),
    "two partitions": (sif(Described(SMALL), Described(SMALL)), "it has 2 primary partitions"),
    "no squashfs": (sif(Described(b"x" * 5000)), "its partition is no squashfs"),
    "an empty partition": (sif(Described(b"", size=0)), "its partition is no squashfs"),
    "ext3": (sif(Described(SMALL, extra=partition(system=2))), "holds an ext3 file system; only squashfs is read"),
    "encrypted": (sif(Described(SMALL, extra=partition(system=5))), "holds an encrypted squashfs"),
    "of the future": (sif(Described(SMALL, extra=partition(system=77))), "holds file system number 77"),
    "an overlay": (sif(Described(SMALL), Described(SMALL, extra=partition(role=4))), "has a writable overlay"),
    "OCI-SIF": (sif(Described(b"{}", kind=0x400A)), "is an OCI-SIF, which is not read"),
    "another machine": (sif(Described(SMALL, extra=partition(architecture=b"04\0"))), "is for linux/arm64, not for"),
    "an unknown machine": (sif(Described(SMALL, extra=partition(architecture=b"zz\0"))), "is for linux/unknown"),
    "settings that are no JSON": (sif(settings(b"{"), Described(SMALL)), "oci-config.json is no JSON"),
    "settings of another form": (sif(settings(b'{"Env": 5}'), Described(SMALL)), "is no configuration of an image"),
    "settings without end": (sif(settings(b" " * 9_000_000), Described(SMALL)), "oci-config.json is too large"),
    "a name that leads out": (
        sif(Described(squashfs([Member("d/.. ", b"x")]).replace(b".. ", b"../"))),
        "name that is none",
    ),
    "the folder above": (sif(Described(squashfs([Member("d/xx", b"x")]).replace(b"xx", b".."))), "a name that is none"),
    "a zero in a name": (
        sif(Described(squashfs([Member("d/xx", b"x")]).replace(b"xx", b"x\0"))),
        "a name that is none",
    ),
    "a folder in itself": (sif(Described(squashfs([Member("d/e", LOOP, tarfile.DIRTYPE)]))), "a folder is in itself"),
    "too deep": (sif(Described(squashfs([Member("d/" * 300 + "a", b"x")]))), "too deep"),
}


@pytest.mark.parametrize("how", REFUSED)
async def test_a_damaged_or_hostile_file_is_one_line_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    data, said = REFUSED[how]
    (tmp_path / "bad.sif").write_bytes(data)
    with pytest.raises((BadEnvironmentError, ConfigError)) as caught:
        await from_file(tmp_path / "bad.sif", tmp_path / "cache")
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not ImageStore(tmp_path / "cache").images() and not list((tmp_path / "cache").rglob("*.making-*"))


async def test_nothing_of_it_gives_rights_or_leads_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    written(
        tmp_path / "a.sif",
        *(Member("su", b"x", mode=0o6755), Member("null", kind=tarfile.CHRTYPE), Member("disk", kind=tarfile.BLKTYPE)),
        *(Member("pipe", kind=tarfile.FIFOTYPE), symlink("out", str(tmp_path)), symlink("up", "../../../../secret")),
    )
    root = (await from_file(tmp_path / "a.sif", tmp_path / "cache")).root
    assert sorted(os.listdir(root)) == ["out", "su", "up"]
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert (root / "out").is_symlink() and (root / "up").is_symlink()


@pytest.mark.parametrize(
    ("limits", "members"),
    [
        ({"size": 10_000}, [Member(f"f{n}", bytes(5000)) for n in range(4)]),
        ({"file": 4000}, [Member("f", bytes(5000))]),
        ({"files": 20}, [Member(f"f{n}", b"") for n in range(40)]),
    ],
)
async def test_it_is_bounded_like_other_images(tmp_path: Path, limits: dict[str, int], members: list[Member]) -> None:
    written(tmp_path / "a.sif", *members)
    with pytest.raises(ConfigError, match="larger than an image may be; --max-image-size allows more"):
        await from_file(tmp_path / "a.sif", tmp_path / "cache", ImageLimits(**limits))


async def test_a_size_that_lies_is_not_believed(tmp_path: Path) -> None:
    """A file of 2**62 bytes in a few: by the limit of one, and without it by its blocks."""
    data = squashfs([Member("f", b"x" * 5000)])
    lies = data.replace(struct.pack("<QQ", 5000, 0), struct.pack("<QQ", 2**62, 0))
    assert lies != data
    (tmp_path / "a.sif").write_bytes(sif(Described(lies)))
    with pytest.raises(ConfigError, match="larger than an image may be"):
        await from_file(tmp_path / "a.sif", tmp_path / "cache")
    with pytest.raises(BadEnvironmentError, match="is no squashfs that can be read"):
        await from_file(tmp_path / "a.sif", tmp_path / "cache2", ImageLimits(file=2**63, size=2**63))


def bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def numbers(data: bytearray, chance: random.Random) -> None:
    """In the superblock, or anywhere."""
    at = chance.randrange(0, chance.choice([96, len(data) - 8]))
    data[at : at + 8] = struct.pack("<q", chance.choice([0, -1, 2**31 - 1, 2**63 - 1, 8193, 0x7FFF, 1 << 24]))


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


@pytest.mark.parametrize("damage", [bits, numbers, cut])
@pytest.mark.parametrize("kind", ["gzip", "xz", "zstd"])
def test_random_damage(tmp_path: Path, kind: str, damage: Callable[[bytearray, random.Random], None]) -> None:
    """In the partition of a real file: an error of one line, or a tree; nothing else, and nothing outside."""
    whole = (SIFS / f"{kind}.sif").read_bytes()
    chance, refused = random.Random(7), 0
    limits = ImageLimits(size=2**22, files=5000, file=2**21)
    for number in range(8):
        data, into = bytearray(whole[whole.index(b"hsqs") :]), tmp_path / "tree" / str(number)
        into.mkdir(parents=True)
        damage(data, chance)
        try:
            unpack_layer(BytesIO(data), into, sha256(data), limits, what="the layer", stop=Event())
        except (BadEnvironmentError, ConfigError) as error:
            refused += 1
            assert "\n" not in str(error)
        shutil.rmtree(into)
    assert refused
    assert sorted(os.listdir(tmp_path)) == ["tree"]


@pytest.mark.skipif(not shutil.which("unsquashfs"), reason="needs unsquashfs (apt-get install squashfs-tools)")
def test_the_test_writer_writes_what_the_real_tool_reads(tmp_path: Path) -> None:
    members = [Member(f"d/{number}", b"%d" % number * 2000) for number in range(300)]
    (tmp_path / "a.squashfs").write_bytes(squashfs([*members, symlink("link", "d/1")]))
    words = ["unsquashfs", "-quiet", "-no-progress", "-dest", str(tmp_path / "tree"), str(tmp_path / "a.squashfs")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    assert all((tmp_path / "tree" / each.name).read_bytes() == each.content for each in members)
    assert os.readlink(tmp_path / "tree/link") == "d/1"
