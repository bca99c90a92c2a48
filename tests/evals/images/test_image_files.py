"""Images in files, the cache that they are unpacked into, and ``openhands-rl images``."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from made_images import (
    MadeImage,
    Member,
    docker_files,
    folder,
    here,
    index_of,
    layer,
    make_image,
    oci_files,
    symlink,
    write_archive,
    write_layout,
)

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.evals.images.finding import ImageFinder
from openhands_rl_plugin.evals.images.layers import Unpacking
from openhands_rl_plugin.evals.images.paths import inside, user_ids
from openhands_rl_plugin.evals.images.store import ImageStore, StoredImage

BASE = layer([Member("base", b"1" * 1000), folder("etc")])
PASSWD = Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nworker:x:1234:99::/home/worker:/bin/sh\n")


def image_of(*members: Member, **settings: object) -> MadeImage:
    return make_image([BASE, layer(members)], packed="", **settings)


async def from_file(path: Path, cache: Path, name: str = "") -> StoredImage:
    return await ImageFinder(ImageStore(cache)).from_file(path, name)


KINDS = {
    "OCI archive": lambda folder, image: write_archive(folder / "a.tar", oci_files(image)),
    "OCI archive, gzip": lambda folder, image: write_archive(folder / "a.tar.gz", oci_files(image)),
    "OCI archive, zstd": lambda folder, image: write_archive(folder / "a.tar.zst", oci_files(image)),
    "OCI layout": lambda folder, image: write_layout(folder / "layout", oci_files(image)),
    "docker save": lambda folder, image: write_archive(folder / "a.tar", docker_files(image, "a/b:1")),
    "docker save, gzip": lambda folder, image: write_archive(folder / "a.tar.gz", docker_files(image, "a/b:1")),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_file_is_read(tmp_path: Path, kind: str) -> None:
    made = image_of(Member("own", b"2"), Env=["A=1", "B=x=y"], WorkingDir="/work", User="worker", Cmd=["/bin/sh"])
    image = await from_file(KINDS[kind](tmp_path, made), tmp_path / "cache")
    assert (image.id, (image.root / "own").read_text()) == (made.config, "2")
    config = image.config
    assert (config.env, config.workdir, config.user) == ({"A": "1", "B": "x=y"}, "/work", "worker")
    assert config.command == ("/bin/sh",)
    assert not list(ImageStore(tmp_path / "cache").scratch.iterdir())


async def test_one_of_several_images_is_named(tmp_path: Path) -> None:
    one, two = image_of(Member("one", b"1")), image_of(Member("two", b"2"))
    lists = [json.loads(index_of({here(): each}, tag=tag)) for each, tag in ((one, "1"), (two, "2"))]
    index = json.dumps({"manifests": [each["manifests"][0] for each in lists]}).encode()
    files = {**oci_files(one), **oci_files(two), "index.json": index}
    path = write_archive(tmp_path / "two.tar", files)
    with pytest.raises(ConfigError, match=r"has 2 images .*; say which with --name"):
        await from_file(path, tmp_path / "cache")
    assert (await from_file(path, tmp_path / "cache", "someone/x:2")).id == two.config


async def test_docker_links_a_layer_that_it_wrote_before(tmp_path: Path) -> None:
    made = make_image([BASE, BASE], packed="")
    first = next(name for name in docker_files(made) if name.endswith("/layer.tar"))
    listed = [{"Config": f"{made.config[7:]}.json", "RepoTags": None, "Layers": [first, "other/layer.tar"]}]
    files = {**docker_files(made), "manifest.json": json.dumps(listed).encode()}
    members = [Member(name, content) for name, content in files.items()]
    (tmp_path / "a.tar").write_bytes(layer([*members, symlink("other/layer.tar", f"../{first}")]))
    assert (await from_file(tmp_path / "a.tar", tmp_path / "cache")).id == made.config


DAMAGE = {
    "no image": lambda image: {"readme": b"x"},
    "no JSON": lambda image: {**oci_files(image), "index.json": b"{"},
    "too deep": lambda image: {**oci_files(image), "index.json": b"[" * 100_000},
    "another manifest": lambda image: {**oci_files(image), _blob(image.manifest): b"{}"},
    "another configuration": lambda image: {**oci_files(image), _blob(image.config): b"{}"},
    "a layer is missing": lambda image: {
        name: data for name, data in oci_files(image).items() if data != image.layers[1]
    },
    "another layer": lambda image: {
        name: image.layers[0] if data == image.layers[1] else data for name, data in oci_files(image).items()
    },
    "a digest that is a path": lambda image: {
        **oci_files(image),
        "index.json": index_of({here(): image}).replace(image.manifest.encode(), b"sha256:../../../etc/passwd"),
    },
}


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


@pytest.mark.parametrize("how", DAMAGE)
async def test_a_damaged_image_is_one_line_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    path = write_archive(tmp_path / "a.tar", DAMAGE[how](image_of(Member("own", b"2"))))
    with pytest.raises((BadEnvironmentError, ConfigError)) as caught:
        await from_file(path, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not ImageStore(tmp_path / "cache").images()
    assert not list((tmp_path / "cache").rglob("*.making-*"))


async def test_layers_are_shared_and_removed_with_their_last_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "cache")
    images = [
        await from_file(
            write_archive(tmp_path / f"{name}.tar", oci_files(image_of(Member(name, b"x")))), tmp_path / "cache", name
        )
        for name in ("one", "two")
    ]
    assert len(list((tmp_path / "cache/layers").iterdir())) == 3 and store.on_disk() == 1002
    assert images[0].root.joinpath("base").stat().st_ino == images[1].root.joinpath("base").stat().st_ino
    assert await store.remove([images[0]]) == 1
    assert [image.id for image in store.images()] == [images[1].id]
    assert (images[1].root / "base").read_bytes() == b"1" * 1000 and store.find("docker.io/library/one:latest") is None
    with store.in_use(), pytest.raises(ConfigError, match="in use by another process"):
        await ImageStore(tmp_path / "cache").remove([images[1]])
    assert await store.remove(store.images()) == 1001
    assert not list((tmp_path / "cache/layers").iterdir())


async def test_a_file_that_was_replaced_is_another_image(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "calc_1.tar", oci_files(image_of(Member("own", b"1"))))
    finder = ImageFinder(ImageStore(tmp_path / "cache"), place=tmp_path)
    first = await finder.find("someone/calc:1")
    path.unlink()
    write_archive(path, oci_files(image_of(Member("own", b"22"))))
    second = await finder.find("someone/calc:1")
    assert first.id != second.id and (second.root / "own").read_bytes() == b"22"


async def test_a_name_is_that_of_the_last_file_that_was_given_it(tmp_path: Path) -> None:
    files = [
        write_archive(tmp_path / f"{name}.tar", oci_files(image_of(Member(name, b"x")))) for name in ("one", "two")
    ]
    for file in (*files, files[0]):
        await from_file(file, tmp_path / "cache", "same:1")
    found = ImageStore(tmp_path / "cache").find("docker.io/library/same:1")
    assert found is not None and (found.root / "one").exists()


def pull_in_a_process(path: Path, cache: Path) -> None:
    asyncio.run(from_file(path, cache))


def test_processes_at_once_unpack_once(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", oci_files(image_of(*(Member(f"f{n}", b"x") for n in range(500)))))
    context = multiprocessing.get_context("fork")
    at_once = [context.Process(target=pull_in_a_process, args=(path, tmp_path / "cache")) for _ in range(3)]
    for each in at_once:
        each.start()
    for each in at_once:
        each.join()
    assert [each.exitcode for each in at_once] == [0, 0, 0]
    assert len(list((tmp_path / "cache/layers").iterdir())) == 2 and len(ImageStore(tmp_path / "cache").images()) == 1


def die_while_unpacking(path: Path, cache: Path) -> None:
    made = iter(range(10))
    original = Unpacking.add

    def add(self, member, reader) -> None:
        if next(made, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, member, reader)

    Unpacking.add = add
    pull_in_a_process(path, cache)


def test_what_a_killed_process_left_is_made_anew(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.tar", oci_files(image_of(*(Member(f"f{n}", b"x") for n in range(20)))))
    process = multiprocessing.get_context("fork").Process(target=die_while_unpacking, args=(path, tmp_path / "cache"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    store = ImageStore(tmp_path / "cache")
    assert not store.images() and list((tmp_path / "cache").rglob("*.making-*"))
    image = asyncio.run(from_file(path, tmp_path / "cache"))
    assert len(os.listdir(image.root)) == 22 and not list((tmp_path / "cache").rglob("*.making-*"))


def test_paths_in_an_image_never_lead_out_of_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    for name, target in {"bin": "/usr/bin", "up": "../../..", "loop": "loop", "etc": "/../etc"}.items():
        (root / name).symlink_to(target)
    assert inside(root, "/bin") == inside(root, "usr/bin") == inside(root, "/up/bin") == root / "usr/bin"
    assert inside(root, "/up") == inside(root, "../..") == root
    assert inside(root, "/loop") is inside(root, "/etc/passwd") is inside(root, "/nothing") is None


@pytest.mark.parametrize(
    ("user", "known"),
    [
        ("", (0, 0, "/root")),
        ("worker", (1234, 99, "/home/worker")),
        ("1234:7", (1234, 7, "/home/worker")),
        ("77", (77, 0, "/")),
    ],
)
async def test_users_of_an_image(tmp_path: Path, user: str, known: tuple[int, int, str]) -> None:
    path = write_archive(tmp_path / "a.tar", oci_files(image_of(PASSWD)))
    image = await from_file(path, tmp_path / "cache")
    assert user_ids(image.root, user) == known
    with pytest.raises(ConfigError, match="is not in its /etc/passwd"):
        user_ids(image.root, "nobody-knows")


def test_the_command(tmp_path: Path, capsys) -> None:
    path = write_archive(tmp_path / "a.tar", oci_files(image_of(Member("own", b"2"))))
    where = ["--cache", str(tmp_path / "cache")]
    assert cli.main(["images", "pull", str(path), "--name", "someone/calc:1", *where]) == 0
    said = capsys.readouterr()
    assert "in 2 layers" in said.out and "unpacking layer 2 of 2" in said.err
    assert cli.main(["images", "list", *where]) == 0
    assert "docker.io/someone/calc:1" in capsys.readouterr().out
    assert cli.main(["images", "list", "--json", *where]) == 0
    (row,) = json.loads(capsys.readouterr().out)["images"]
    assert row["names"] == ["docker.io/someone/calc:1"] and row["size"] == 1001
    assert cli.main(["images", "remove", "someone/calc:1", *where]) == 0
    assert "1 images removed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pull", "./nothing.tar"], "there is no such file"),
        (["pull", "debian", "--name", "x"], "--name is for images in files"),
        (["pull", "debian", "--platform", "windows/amd64"], "give linux/amd64 or linux/arm64"),
        (["remove"], "say which images, or --all"),
        (["remove", "nobody/knows"], "there is no image nobody/knows"),
        (["remove", "No Name"], "is no name of an image"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, capsys, words: list[str], said: str) -> None:
    assert cli.main(["images", *words, "--cache", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
