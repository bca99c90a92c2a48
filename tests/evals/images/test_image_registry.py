"""Images of a registry: tokens, platforms, digests, downloads that are cut and go on."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_images import Member, here, index_of, layer, make_image
from registry_stub import TOKEN, StubRegistry, stub_registry

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.evals.images.finding import ImageFinder
from openhands_rl_plugin.evals.images.layers import ImageLimits
from openhands_rl_plugin.evals.images.references import Reference
from openhands_rl_plugin.evals.images.store import ImageStore, StoredImage

IMAGE = make_image([layer([Member("a", b"1" * 200_000)]), layer([Member("b", bytes(range(256)) * 2000)])], packed="")


@pytest.fixture
def registry() -> Iterator[StubRegistry]:
    with stub_registry() as made:
        made.add("someone/calc", "1", IMAGE)
        yield made


def finder(registry: StubRegistry, cache: Path, limits: ImageLimits | None = None) -> ImageFinder:
    return ImageFinder(ImageStore(cache, limits), registry=registry.address)


async def pulled(registry: StubRegistry, cache: Path, name: str = "someone/calc:1") -> StoredImage:
    return await finder(registry, cache).from_registry(Reference.parse(name))


async def test_an_image_is_pulled_with_a_token_and_found_again(registry: StubRegistry, tmp_path: Path) -> None:
    image = await pulled(registry, tmp_path)
    assert (image.root / "a").read_bytes() == b"1" * 200_000
    assert image.id == IMAGE.config and image.names == ("docker.io/someone/calc:1",)
    assert "/token" in [path for path, _ in registry.asked]
    registry.asked.clear()
    assert (await finder(registry, tmp_path).find("someone/calc:1")).id == image.id
    assert registry.asked == []
    assert list(ImageStore(tmp_path).blobs.iterdir()) == []
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.json"))


async def test_a_digest_is_what_is_pulled(registry: StubRegistry, tmp_path: Path) -> None:
    image = await pulled(registry, tmp_path, f"someone/calc@{IMAGE.manifest}")
    assert image.id == IMAGE.config
    registry.manifests[("someone/calc", IMAGE.manifest)] = b'{"layers": []}'
    with pytest.raises(BadEnvironmentError, match="does not have the digest"):
        await pulled(registry, tmp_path, f"someone/calc@{IMAGE.manifest}")


async def test_the_image_of_this_platform_is_chosen(registry: StubRegistry, tmp_path: Path) -> None:
    other = make_image([layer([Member("other", b"x")])], architecture="s390x")
    index = index_of({"linux/s390x": other, here(): IMAGE, "unknown/unknown": other})
    registry.blobs |= other.blobs
    registry.add("someone/many", "1", IMAGE, index)
    assert (await pulled(registry, tmp_path, "someone/many:1")).id == IMAGE.config
    registry.add("someone/foreign", "1", other, index_of({"linux/s390x": other}))
    with pytest.raises(ConfigError, match=f"no image for {here()}, only for linux/s390x"):
        await pulled(registry, tmp_path, "someone/foreign:1")
    registry.add("someone/plain", "1", other)
    with pytest.raises(ConfigError, match="is for linux/s390x, not for"):
        await pulled(registry, tmp_path, "someone/plain:1")


@pytest.mark.parametrize("ignore_ranges", [False, True])
async def test_a_download_that_was_cut_goes_on(registry: StubRegistry, tmp_path: Path, ignore_ranges: bool) -> None:
    registry.cut_after, registry.ignore_ranges = 150_000, ignore_ranges
    if ignore_ranges:  # then it begins again each time
        registry.most_blobs = 3
        with pytest.raises(InfrastructureError, match="status 503"):
            await pulled(registry, tmp_path)
        registry.cut_after = registry.most_blobs = 0
    image = await pulled(registry, tmp_path)
    assert (image.root / "b").stat().st_size == 512_000
    ranges = [asked for path, asked in registry.asked if "/blobs/" in path and asked]
    assert "bytes=150000-" in ranges


async def test_another_process_continues_a_download(registry: StubRegistry, tmp_path: Path) -> None:
    registry.cut_after, registry.most_blobs, registry.tokens = 20_000, 4, False
    with pytest.raises(InfrastructureError, match="status 503"):
        await pulled(registry, tmp_path)
    (part,) = ImageStore(tmp_path).blobs.glob("*.part")
    have = part.stat().st_size
    assert have == 60_000
    registry.cut_after = registry.most_blobs = 0
    registry.asked.clear()
    await pulled(registry, tmp_path)
    assert f"bytes={have}-" in [asked for _, asked in registry.asked]


async def test_a_registry_that_is_busy_is_asked_again(registry: StubRegistry, tmp_path: Path) -> None:
    registry.tokens = False
    store = finder(registry, tmp_path)
    first = await store.from_registry(Reference.parse("someone/calc:1"))
    await store.store.remove([first])
    registry.busy = 1
    with pytest.raises(InfrastructureError, match="status 503"):  # the configuration is small: no second try
        await store.from_registry(Reference.parse("someone/calc:1"))


async def test_a_layer_with_another_content_is_refused(registry: StubRegistry, tmp_path: Path) -> None:
    layers = {digest: data for digest, data in registry.blobs.items() if len(data) > 100_000}
    registry.blobs |= {digest: bytes(len(data)) for digest, data in layers.items()}
    with pytest.raises(BadEnvironmentError, match="a layer does not have the digest"):
        await pulled(registry, tmp_path)
    assert not ImageStore(tmp_path).images() and not list(ImageStore(tmp_path).blobs.glob("*.part"))
    registry.blobs |= {digest: data + b"more" for digest, data in layers.items()}
    with pytest.raises(BadEnvironmentError, match="a layer is larger than its manifest says"):
        await pulled(registry, tmp_path)
    registry.blobs |= layers
    assert (await pulled(registry, tmp_path)).id == IMAGE.config


async def test_two_at_once_download_once(registry: StubRegistry, tmp_path: Path) -> None:
    found = await asyncio.gather(*(pulled(registry, tmp_path) for _ in range(3)))
    assert {image.id for image in found} == {IMAGE.config}
    layers = [digest for digest in registry.downloads() if digest != IMAGE.config]
    assert len(layers) == len(set(layers)) == 2


async def test_a_login_is_that_of_docker(registry: StubRegistry, tmp_path: Path, monkeypatch) -> None:
    registry.login = "someone:secret-word"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(InfrastructureError, match="gives no token"):
        await pulled(registry, tmp_path / "cache")
    host = registry.address.removeprefix("http://")
    auth = base64.b64encode(registry.login.encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    await pulled(registry, tmp_path / "cache")
    kept = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert b"secret-word" not in kept and auth.encode() not in kept


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("someone/nothing:1", "has no image docker.io/someone/nothing:1"),
        ("Some One", "is no name of an image"),
        ("../../etc", "is no name of an image"),
        ("a/b@sha256:12", "is no name of an image"),
    ],
)
async def test_wrong_names_are_one_line(registry: StubRegistry, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await pulled(registry, tmp_path, name)


@pytest.mark.parametrize("address", ["http://registry.example.org", "https://user:word@example.org", "ftp://x", "://"])
def test_keys_go_over_https_only(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError):
        asyncio.run(ImageFinder(ImageStore(tmp_path), registry=address).from_registry(Reference.parse("a/b")))


async def test_an_image_that_is_too_large_is_not_downloaded(registry: StubRegistry, tmp_path: Path) -> None:
    limited = finder(registry, tmp_path, ImageLimits(size=300_000))
    with pytest.raises(ConfigError, match="--max-image-size"):
        await limited.from_registry(Reference.parse("someone/calc:1"))
    assert registry.downloads() == [IMAGE.config]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("swebench/x:v1", "docker.io/swebench/x:v1"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("ghcr.io/a/b/c:2", "ghcr.io/a/b/c:2"),
        ("docker://index.docker.io/a/b", "docker.io/a/b:latest"),
    ],
)
def test_names_are_read_as_docker_reads_them(name: str, whole: str) -> None:
    assert str(Reference.parse(name)) == whole
