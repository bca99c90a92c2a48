from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tiny_model import write_adapter, write_model

from openhands_rl_plugin.models.generator.config import GeneratorConfig, ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import running_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def adapter_a(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "a", tiny_model, seed=1)


@pytest.fixture(scope="session")
def adapter_b(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}
    return write_adapter(tmp_path_factory.mktemp("adapters") / "b", tiny_model, seed=2, rank=3, **options)


@pytest.fixture(scope="module")
def generator(tiny_model: Path, adapter_a: Path, adapter_b: Path) -> Iterator[Generator]:
    """The tiny model in float32 with the adapters `a` and `b`."""
    with Generator(GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1, max_batch=8)) as generator:
        generator.load_adapter("a", adapter_a)
        generator.load_adapter("b", adapter_b)
        yield generator


@pytest.fixture(scope="module")
def server(tiny_model: Path, generator: Generator) -> Iterator[str]:
    """Base URL of a server over `generator`; the base model is called `tiny`."""
    config = ServerConfig(model=str(tiny_model), served_model_name="tiny", port=0, max_body_bytes=200_000, adapters="/")
    with running_server(config, generator) as url:
        yield url


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    """A client of `server`."""
    with httpx.Client(base_url=server, verify=False, timeout=30, headers={"content-type": "application/json"}) as one:
        yield one
