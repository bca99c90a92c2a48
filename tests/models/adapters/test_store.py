"""Versions on disk: complete or absent, verified, pointed at; and publication into the real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tiny_model import write_model, write_tokenizer

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, PublishError, StorageError
from openhands_rl_plugin.core.types import Adapter, Sample
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.training.trainer.trainer import LoraTrainer

PROBE = tuple(range(2, 40))


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
    assert second.parent == first.name


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


def test_what_killed_writers_left_is_swept_after_a_day(tmp_path: Path) -> None:
    names = [".new-old", ".verifier-old", ".new-now"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS_FILE).write_bytes(b"half")
    for name in names[:2]:
        os.utime(tmp_path / name, (0, 0))
    AdapterStore(tmp_path).create("shop", write, base_model="base")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".new-now", "shop-v000001"]


def test_the_pointer_moves_and_survives(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    assert store.current("shop") is None
    for _ in range(2):
        store.point(store.create("shop", write, base_model="base"))
    assert AdapterStore(tmp_path).current("shop") == store.latest("shop")


@pytest.mark.parametrize("name", ["../shop", "a/b", "", "..", "a..b", ".hidden", "x" * 200])
def test_a_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="adapter name"):
        AdapterStore(tmp_path).create(name, write, base_model="base")
    with pytest.raises(ConfigError, match="adapter name"):
        AdapterStore(tmp_path).get(name)


def test_a_failed_write_leaves_nothing_visible(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        write(directory)
        raise OSError(28, "No space left on device")

    store = AdapterStore(tmp_path)
    with pytest.raises(StorageError, match="free some space"):
        store.create("shop", fail, base_model="base")
    assert store.versions("shop") == ()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path;"
        "from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE;"
        "from openhands_rl_plugin.models.adapters.store import AdapterStore;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"store = AdapterStore({str(tmp_path)!r});"
        "store.create('shop', lambda d: (d / WEIGHTS_FILE).write_bytes(b'x' * 10**6), base_model='b')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "StorageError: the adapter cannot be written" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_found(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    adapter = store.create("shop", write, base_model="base")
    (Path(adapter.path) / WEIGHTS_FILE).write_bytes(b"Weights")
    with pytest.raises(PublishError, match="damaged"):
        store.verify(adapter)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("publish") / "model"
    write_model(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    config = ServerConfig(model=str(model), served_model_name="base", port=0, dtype="float32", adapters="/")
    with running_server(config) as url:
        yield url


def trainer(model: Path, seed: int = 0) -> LoraTrainer:
    """A trainer whose adapter has left its starting point, where it would change nothing."""
    made = LoraTrainer(model, TrainingSettings(learning_rate=0.05, num_epochs=2, dtype="float32", seed=seed))
    ids = tuple((7 * at + seed) % 200 + 2 for at in range(24))
    made.sft([Sample(trajectory_id="t", leaf=0, input_ids=ids, mask=(False,) * 4 + (True,) * 20, logprobs=(0.0,) * 24)])
    return made


def stored(store: AdapterStore, made: LoraTrainer) -> Adapter:
    return store.create("live", made.save_adapter, base_model="base")


async def served_names(server: str) -> set[str]:
    async with httpx.AsyncClient(base_url=server) as client:
        return {entry["id"] for entry in (await client.get("/v1/models")).json()["data"]}


async def test_publish_probes_points_and_unloads(model: Path, server: str, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    async with AdapterPublisher(f"{server}/v1", store, keep=1) as publisher:
        for seed in range(3):
            made = trainer(model, seed)
            adapter = stored(store, made)
            report = await publisher.publish(adapter, made.probe(PROBE))
            assert report.difference is not None and report.difference < 1e-3
            assert store.current("live") == adapter
        assert "live-v000002" in report.unloaded
        assert await served_names(server) == {"base", "live-v000003"}
        await publisher.retire("live-v000003")


async def test_an_adapter_that_serves_something_else_is_refused(model: Path, server: str, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    async with AdapterPublisher(server, store) as publisher:
        old = trainer(model, 0)
        in_use = stored(store, old)
        await publisher.publish(in_use, old.probe(PROBE))
        wrong = stored(store, trainer(model, 1))
        with pytest.raises(PublishError, match="differ from the trainer's"):
            await publisher.publish(wrong, old.probe(PROBE))
        assert store.current("live") == in_use
        assert await served_names(server) == {"base", in_use.name}
        await publisher.retire(in_use.name)


async def test_damage_and_absence_are_publish_errors(model: Path, server: str, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    adapter = stored(store, trainer(model))
    async with AdapterPublisher("http://127.0.0.1:9", store) as away:
        with pytest.raises(PublishError, match="nothing answers"):
            await away.publish(adapter)
    (Path(adapter.path) / WEIGHTS_FILE).write_bytes(b"cut")
    async with AdapterPublisher(server, store) as publisher:
        with pytest.raises(PublishError, match="damaged"):
            await publisher.publish(adapter)
    assert store.current("live") is None
