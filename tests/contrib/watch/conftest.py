"""One small shop and one model server for all tests of a watch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shopper_model import shop_and_server, write_shopper
from watched import MODEL


@pytest.fixture(scope="package")
def shopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_shopper(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="package")
def served(shopper: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a small shop and of a model server."""
    with shop_and_server(shopper, MODEL) as urls:
        yield urls
