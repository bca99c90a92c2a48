"""A taught tiny model on the package's own server, for all tests here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from caller_model import write_caller

# Before torch, which reads what this says about threads when it is loaded.
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(write_caller(tmp_path_factory.mktemp("models") / "caller"))


@pytest.fixture(scope="session")
def model_url(caller: Path) -> Iterator[str]:
    """``base_url`` of the server; its model is called ``caller``."""
    # Without the prefix cache the numbers of two equal requests are equal to the last bit, and not to the sixth digit.
    options = {"served_model_name": "caller", "port": 0, "dtype": "float32", "threads": 1, "cache_bytes": 0}
    with running_server(ServerConfig.model_validate({"model": str(caller), **options})) as url:
        yield f"{url}/v1"
