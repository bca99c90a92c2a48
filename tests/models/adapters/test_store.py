"""Versions on disk: complete or absent, verified, pointed at."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openhands_rl_plugin.core.errors import ConfigError, PublishError, StorageError
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore


def write(directory: Path) -> None:
    (directory / WEIGHTS_FILE).write_bytes(b"weights")
    (directory / "adapter_config.json").write_text("{}")


def test_versions_count_up_and_are_never_overwritten(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    first = store.create("shop", write, base_model="base", metrics={"loss": 0.5})
    second = store.create("shop", write, base_model="base", parent=first.name, step=3)
    assert (first.name, second.name) == ("shop-v000001", "shop-v000002")
    assert store.versions("shop") == (first, second)
    assert store.latest("shop") == store.get("shop-v000002") == second
    assert second.parent == first.name and store.current("shop") is None
    store.point(second)
    assert AdapterStore(tmp_path).current("shop") == second


def test_a_version_is_removed_whole_and_never_the_one_in_use(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    first, second = (store.create("shop", write, base_model="base") for _ in range(2))
    store.point(first)
    with pytest.raises(StorageError, match="shop-v000001 is in use: publish another version before"):
        store.remove(first.name)
    store.point(second)
    for _ in range(2):
        store.remove(first.name)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shop-v000002", "shop.current.json"]
    assert store.create("shop", write, base_model="base").name == "shop-v000003"
    with pytest.raises(ConfigError):
        store.remove("../shop-v000002")


def test_concurrent_writers_get_versions_of_their_own(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: store.create("shop", write, base_model="base").version, range(24)))
    assert sorted(made) == list(range(1, 25))


@pytest.mark.parametrize("name", ["../shop", "a/b", "", "a..b", ".hidden", "x" * 200])
def test_a_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="adapter name"):
        AdapterStore(tmp_path).create(name, write, base_model="base")


def test_a_failed_write_leaves_nothing_visible(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        write(directory)
        raise OSError(28, "No space left on device")

    store = AdapterStore(tmp_path)
    with pytest.raises(StorageError, match="free some space"):
        store.create("shop", fail, base_model="base")
    assert store.versions("shop") == ()
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_found(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    adapter = store.create("shop", write, base_model="base")
    (Path(adapter.path) / WEIGHTS_FILE).write_bytes(b"Weights")
    with pytest.raises(PublishError, match="damaged"):
        store.verify(adapter)
