"""One small shop and one model server for all tests of a watch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shopper_model import write_shopper
from small_shop import running_shop
from watched import MODEL

from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server


@pytest.fixture(scope="package")
def shopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_shopper(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="package")
def served(shopper: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a small shop and of a model server."""
    config = ServerConfig(
        model=str(shopper), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=8, adapters="/"
    )
    with running_shop() as shop, running_server(config) as server:
        yield shop, server
