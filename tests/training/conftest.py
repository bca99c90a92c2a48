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


@pytest.fixture(scope="session")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights whose tokenizer makes short prompts of a verifier's question."""
    from verifier_store import tiny_judge

    return tiny_judge(tmp_path_factory.mktemp("models") / "tiny-judge")


@pytest.fixture(scope="session")
def verifier(judge_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a verifier that the command trained on episodes whose outcome stands in their text."""
    from verifier_store import trained_by_command

    return trained_by_command(judge_model, tmp_path_factory.mktemp("verifier"))
