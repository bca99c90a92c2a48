"""Adapters are published to a vLLM on a GPU that answers a thousand requests meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.performance.serving.vllm_server import PYTHON_VARIABLE, NoVLLMError, vllm_python

ROOT = Path(__file__).parents[3]
NEEDS = f"the python of an environment with vLLM for CUDA in {PYTHON_VARIABLE}"


@pytest.mark.gpu(also=NEEDS)
@pytest.mark.timeout(1200)
def test_a_thousand_requests_while_adapters_are_replaced() -> None:
    """20 versions, each with other weights; wrong, damaged and unreadable ones are refused, and no request fails."""
    try:
        vllm_python("cuda")
    except NoVLLMError as error:
        pytest.skip(f"NOT TESTED AGAINST A vLLM ON A GPU: {error}")
    command = [sys.executable, "-m", "evaluation.performance.serving.publish_vllm", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--requests", "1000"], cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
