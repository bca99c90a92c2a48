"""The set-up script with PyTorch's CPU build, resolved against a local index page."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv") or pytest.skip("uv is not installed")


def locked(name: str) -> str:
    found = re.search(rf'^name = "{name}"\nversion = "(.*)"$', (ROOT / "uv.lock").read_text(), re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A simple index as PyTorch's: only torch, as a build for processors."""
    version = f"{locked('torch')}+cpu"
    page = tmp_path / "index" / "torch"
    page.mkdir(parents=True)
    wheel = page / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(
            f"torch-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        made.writestr(
            f"torch-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"torch-{version}.dist-info/RECORD", "")
    (page / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_cpu_build_is_the_locked_version_without_cuda(index: str, tmp_path: Path) -> None:
    environ = {**os.environ, "DRY_RUN": "1", "PYTORCH_INDEX": index, "UV_CACHE_DIR": str(tmp_path / "cache")}
    command = ["sh", str(ROOT / ".ci" / "setup-cpu"), uv(), sys.executable]
    made = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert made.returncode == 0, made.stderr
    assert f"torch=={locked('torch')}+cpu" in made.stderr
    names = {line.split("==")[0].split(" ")[0] for line in made.stdout.splitlines()}
    assert {"openhands-ai", "transformers", "peft", "safetensors"} <= names
    assert not [name for name in names if re.match(r"torch$|triton$|nvidia-|cuda-", name)]
    assert len(names) > 200
