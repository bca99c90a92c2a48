"""What importing the package costs: real subprocesses, because this one has loaded everything already."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from needs import CONTRIB, find_spec

import openhands_rl_plugin

# Every Python process of an environment runs the autoload line of the wheel, so this must stay tiny.
IMPORT_CPU_SECONDS = 0.5

FORBIDDEN = {
    "accelerate",
    "httpx",
    "litellm",
    "openhands",
    "peft",
    "pydantic",
    "pymongo",
    "rich",
    "starlette",
    "torch",
    "transformers",
    "uvicorn",
}


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_importing_the_package_loads_nothing_and_prints_nothing() -> None:
    code = "import sys; import openhands_rl_plugin; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in run(code).split()}
    assert loaded.isdisjoint(FORBIDDEN)
    assert run("import openhands_rl_plugin") == ""


def test_importing_the_package_is_quick() -> None:
    code = "import time; start = time.process_time(); import openhands_rl_plugin; print(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(3)) < IMPORT_CPU_SECONDS


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules of a process that imports these of the package."""
    wanted = ", ".join(f"openhands_rl_plugin.{each}" for each in modules)
    return {name.split(".")[0] for name in run(f"import sys, {wanted}; print(*sys.modules)").split()}


def test_the_core_loads_no_heavy_library() -> None:
    core = ("core.types", "core.errors", "core.protocols", "core.tree", "config.toml", "config.registry")
    assert loaded_by(*core, "rollout.episode", "cli").isdisjoint(FORBIDDEN - {"pydantic"})


def test_torch_and_openhands_are_left_alone_by_what_does_not_need_them() -> None:
    data = ("trajectories.sqlite.storage", "training.algorithms", "training.data.packing", "training.loop.loop")
    light = ("rollout.many", "rollout.scoring", "models.generator.config", "apps.loop.run", *data)
    studio = ("contrib.studio.server",) if CONTRIB else ()
    assert loaded_by(*light, *studio).isdisjoint({"torch", "transformers", "peft", "openhands", "litellm"})


def test_every_public_name_can_be_had() -> None:
    """Those of MongoDB where its client is."""
    names = set(openhands_rl_plugin.__all__)
    assert names <= set(dir(openhands_rl_plugin))
    assert all(getattr(openhands_rl_plugin, each) for each in names if find_spec("pymongo") or "Mongo" not in each)


def test_editors_see_the_same_names() -> None:
    stub = ast.parse(Path(openhands_rl_plugin.__file__ or "").with_suffix(".pyi").read_text())
    typed = {
        alias.asname or alias.name: ((node.module or "").removeprefix("openhands_rl_plugin."), alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exports = {name: target.partition(":") for name, target in openhands_rl_plugin._EXPORTS.items()}
    # Other names are assignments there, because a stub exports no alias.
    renamed = {
        ast.unparse(node.targets[0]): ast.unparse(node.value) for node in stub.body if isinstance(node, ast.Assign)
    }
    typed |= {name: typed[of] for name, of in renamed.items()}
    typed = {name: at for name, at in typed.items() if name in exports or name not in renamed.values()}
    assert typed == {name: (module, attribute or name) for name, (module, _, attribute) in exports.items()}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RLAgnt'"):
        _ = openhands_rl_plugin.RLAgnt
