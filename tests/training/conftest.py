import sys
from pathlib import Path

import pytest

# The tiny models on disk are shared with the server's tests.
sys.path.append(str(Path(__file__).parents[1] / "serving"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    from tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama")
