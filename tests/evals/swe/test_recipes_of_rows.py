"""Where recipes come from, and what is in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository_samples import TEST_PATCH, git, instance

from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError
from openhands_rl_plugin.evals.swe import recipes, shim
from openhands_rl_plugin.evals.swe.grading import resolution_of
from openhands_rl_plugin.evals.swe.instances import Instance, row_of
from openhands_rl_plugin.evals.swe.recipes import STATUSES, Recipe, parse_pytest, parser_of, recipe_of

needs_swebench = pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="swebench is not installed (extra: swe)"
)


def no_file(repo: str, commit: str, path: str) -> str | None:
    raise AssertionError(f"{path} was asked for")


def row(repo: str, version: str, **changes) -> Instance:
    name = f"{repo.replace('/', '__')}-1"
    return Instance(
        instance_id=name, repo=repo, base_commit="c0ffee", version=version, test_patch=TEST_PATCH, **changes
    )


@pytest.mark.parametrize(
    ("repo", "command", "parser"),
    [
        ("python/mypy", 'pytest -n0 -rA -k ""', "parse_log_pytest"),
        ("Project-MONAI/MONAI", "pytest -rA tests/test_calc.py", "parse_log_pytest"),
        ("pydantic/pydantic", "--no-header tests/test_calc.py", "parse_log_pytest_v2"),
    ],
)
def test_rows_of_swe_gym_are_graded_in_their_images(repo: str, command: str, parser: str) -> None:
    recipe = recipe_of(row(repo, "1"), no_file)
    assert command in recipe.evaluation_script and (recipe.parser, recipe.environment_script) == (parser, "")
    assert recipe.image == f"xingyaoww/sweb.eval.x86_64.{repo.lower().replace('/', '_s_')}-1:latest"


def test_what_nobody_knows_is_one_line(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="column install"):
        recipe_of(instance("c0ffee", extra={"test_command": "true", "install": 3}), no_file)
    absent = ModuleNotFoundError("No module named 'swebench'", name="swebench")
    monkeypatch.setattr(recipes, "import_module", Mock(side_effect=absent))
    with pytest.raises(MissingExtraError, match=r"openhands_rl_plugin\[swe\]"):
        recipe_of(row("psf/requests", "2.3"), no_file)


@needs_swebench
@pytest.mark.slow
def test_official_rows_have_the_official_scripts() -> None:
    with pytest.raises(ConfigError, match="unknown log_parser 'mine'"):
        parser_of("mine")
    from swebench.harness.test_spec.test_spec import make_test_spec

    requests = row("psf/requests", "2.3")
    recipe = recipe_of(requests, no_file)
    spec = make_test_spec(row_of(requests), namespace="swebench")
    assert recipe.environment_script == spec.setup_env_script
    assert recipe.install_script == spec.install_repo_script
    assert recipe.evaluation_script == spec.eval_script
    assert recipe.image == "swebench/sweb.eval.x86_64.psf_1776_requests-1:latest"
    assert (recipe.python, recipe.parser) == ("3.9", "parse_log_pytest_options")
    for other in (row("google/gson", "2158"), row("pydata/xarray", "0.12")):
        imaged = recipe_of(other, lambda repo, commit, path: "dependencies:\n")
        assert imaged.environment_script == "" and imaged.image and "git apply" in imaged.evaluation_script


@needs_swebench
@pytest.mark.slow
def test_requirement_files_are_read_from_the_repository() -> None:
    asked = []

    def read(repo: str, commit: str, path: str) -> str | None:
        asked.append((repo, commit, path))
        return {"requirements/dev.txt": "-r tests.txt\nflake8==6.1\n", "requirements/tests.txt": "pytest==7.4\n"}.get(
            path
        )

    recipe = recipe_of(row("pallets/flask", "2.3", environment_setup_commit="5e7d0b"), read)
    assert "flake8==6.1" in recipe.environment_script and "pytest==7.4" in recipe.environment_script
    assert asked == [("pallets/flask", "5e7d0b", f"requirements/{name}.txt") for name in ("dev", "tests")]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("PASSED t.py::test_value[1 + 2]", "t.py::test_value[1 + 2]"),
        ("FAILED t.py::test_value[1 - 2] - assert [0] - [1]", "t.py::test_value[1 - 2]"),
        ("FAILED t.py::test_plain - assert [0] - [1]", "t.py::test_plain"),
        ("SKIPPED [1] t.py:3: why", None),
    ],
)
def test_names_are_those_of_the_runner(line: str, name: str | None) -> None:
    assert [*parse_pytest(f"noise\n{line}\n")] == ([name] if name else [])


OWN = Recipe(parser="pytest")
tests = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, max_size=3).map(tuple)


@needs_swebench
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pass_and_fail", "fail_only"])
@given(tests, tests, st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(STATUSES)))
def test_own_judgements_are_the_official_ones(
    kind: str, fixed: tuple[str, ...], kept: tuple[str, ...], found: dict[str, str]
) -> None:
    instance = row("psf/requests", "2.3", fail_to_pass=fixed, pass_to_pass=kept)
    own = resolution_of(instance, OWN.model_copy(update={"eval_type": kind}), found)
    wanted = {"FAIL_TO_PASS": list(fixed), "PASS_TO_PASS": list(kept)}
    grading, kinds = recipes.swebench("grading"), recipes.swebench("constants").EvalType
    official = grading.get_eval_tests_report(found, wanted, eval_type=kinds(kind))
    groups = (("FAIL_TO_PASS", own.fail_to_pass), ("PASS_TO_PASS", own.pass_to_pass))
    assert all([*each.success] == official[name]["success"] for name, each in groups)
    skipped = {name for name in fixed if found.get(name) == "SKIPPED"}
    assert all({*each.failure} - skipped == {*official[name]["failure"]} - skipped for name, each in groups)


def test_where_no_test_of_the_row_passed_or_a_fixed_one_is_skipped_nothing_is_resolved() -> None:
    task = row("a/b", "1", fail_to_pass=("a",), pass_to_pass=("b",))
    assert resolution_of(task, OWN, {"a": "XFAIL", "b": "SKIPPED"}).resolved
    assert not resolution_of(task, OWN, {"a": "SKIPPED", "b": "PASSED"}).resolved
    for found in ({}, {"b": "SKIPPED"}, {"other": "PASSED"}):
        for each in (row("a/b", "1"), row("a/b", "1", pass_to_pass=("b",))):
            assert not resolution_of(each, OWN, found).resolved


SHIM = Path(shim.__file__).parent


@pytest.fixture
def installing():
    spec = importlib.util.spec_from_file_location("shim_installing", SHIM / "installing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "kept"), [("calc/add.py", True), ("calc/fast.c", False), ("calc/setup_package.py", False)]
)
def test_what_was_compiled_is_kept_until_its_sources_change(
    installing, monkeypatch, tmp_path: Path, file: str, kept: bool
) -> None:
    for each in ("setup.py", "calc/add.py", "calc/fast.c", "calc/setup_package.py"):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("x\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installing, "INSTALLED", tmp_path / ".git" / "editable.json")
    ran = []
    monkeypatch.setattr(installing, "uv", lambda *words: ran.append(words) or 0)
    assert installing.main(["pip", "install", "-v", "-e", "."]) == 0
    assert ran.pop() == ("install", "-e", ".", *installing.LEGACY)
    monkeypatch.setattr(installing, "OFFLINE", True)
    (tmp_path / file).write_text("changed\n")
    assert installing.main(["pip", "install", "-v", "-e", "."]) == 0 and (not ran) is kept
    assert installing.main(["pip", "config", "list"]) == 1
