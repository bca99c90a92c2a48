"""Repair tasks: functions cut out of packages, bugs of twelve kinds, examples that no agent sees."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from broken_repository import commit_of
from needs import needs_bubblewrap

from openhands_rl_plugin.contrib.repair import calling
from openhands_rl_plugin.contrib.repair.bugs import LONGEST_FUNCTION, bugs_in
from openhands_rl_plugin.contrib.repair.oracle import fixed_text
from openhands_rl_plugin.contrib.repair.rows import RepairSpec, at_level, repair_instances, repository_files, spec_of
from openhands_rl_plugin.contrib.repair.suites import RepairBackend, more_instances, same
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.evals.runs.suites import find_suite, instruction_of, swe_tasks
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import KINDS
from openhands_rl_plugin.evals.tasks.make import NO_OP


@pytest.fixture(scope="module")
def published() -> tuple[Instance, ...]:
    return repair_instances(3, "all")


def test_the_published_tasks_are_split_by_package_and_function(published: tuple[Instance, ...]):
    split = {name: repair_instances(1, name) for name in ("train", "heldout")}
    assert len(published) >= 400 and len(split["heldout"]) >= 100
    for what in (lambda each: each.package, lambda each: each.function):
        assert not {what(spec_of(each)) for each in split["train"]} & {what(spec_of(each)) for each in split["heldout"]}
    specs = [spec_of(each) for each in published]
    assert {spec.kind for spec in specs} == set(KINDS) and all(spec.license for spec in specs)
    assert all(
        commit_of(repository_files(spec)) == each.base_commit
        for each, spec in list(zip(published, specs, strict=True))[::80]
    )
    for spec in specs:
        tree = ast.parse(spec.files[spec.path])
        node = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == spec.function)
        assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION + 1


def test_a_statement_has_less_at_every_level(published: tuple[Instance, ...]):
    entry = swe_tasks(find_suite("repair-1"))[0]
    assert entry.instance is not None
    spec, test = spec_of(entry.instance), entry.instance.fail_to_pass[0].partition("::")[2]
    one, two, three = (instruction_of(at_level(entry.instance, level)) for level in (1, 2, 3))
    assert all(test in text and "/workspace/repo" in text for text in (one, two, three))
    text = spec.files[spec.path].splitlines()[spec.line - 1].strip()
    head = next(line for line in spec.files[spec.path].splitlines() if line.startswith(f"def {spec.function}("))
    assert f"line {spec.line} of {spec.path}, in {head}\n{text}\n" in one and spec.path not in three
    assert text not in two
    assert f"function {spec.function} in" in two and "line" not in two


def test_further_tasks_have_other_bugs_that_the_tests_detect_in_the_functions_of_the_training_split():
    more, own = more_instances(1), repair_instances(1, "train")
    specs = [*map(spec_of, more)]
    assert len(more) > 900 and {spec.kind for spec in specs} == set(KINDS)
    assert len({each.instance_id for each in (*more, *own)}) == len(more) + len(own)
    assert {spec.function for spec in specs} <= {spec_of(each).function for each in own}
    texts = [spec.files[spec.path] for spec in specs]
    assert len({*texts, *(spec_of(each).files[spec_of(each).path] for each in own)}) == len(texts) + len(own)
    for each, spec in list(zip(more, specs, strict=True))[::60]:
        assert each.fail_to_pass and commit_of(repository_files(spec)) == each.base_commit
        assert spec.kind in {kind for kind, text in bugs_in(fixed_text(each), spec.function) if text == module_of(spec)}


def module_of(spec: RepairSpec) -> str:
    """The module with the bug."""
    return spec.files[spec.path]


async def graded(instance: Instance, patch: str, folder: Path) -> PatchVerdict:
    return await RepairBackend().grade(instance, patch, logs=folder / "logs", timeout=60)


@needs_bubblewrap
async def test_the_fix_resolves_and_nothing_else_does(published: tuple[Instance, ...], tmp_path: Path):
    long, instance = (
        next(each for each in published if spec_of(each).function == name) for name in ("sliced", "underscore")
    )
    for each in (long, instance):
        assert (await graded(each, each.patch, tmp_path)).resolved
    nothing = await graded(instance, NO_OP, tmp_path)
    assert nothing.kind is VerdictKind.UNRESOLVED and nothing.fail_to_pass.failure == instance.fail_to_pass
    assert (
        await graded(instance, "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-no\n+yes\n", tmp_path)
    ).kind is (VerdictKind.UNAPPLIED)


@needs_bubblewrap
async def test_answers_of_the_shown_tests_are_not_enough(published: tuple[Instance, ...], tmp_path: Path):
    instance = next(each for each in published if spec_of(each).function == "underscore")
    spec = spec_of(instance)
    answers = {spec.calls[at][0]: ast.literal_eval(spec.expected[at]) for at in range(spec.shown)}
    text = f"ANSWERS = {answers!r}\n\ndef underscore(word):\n    return ANSWERS.get((repr(word),), '')\n"
    lines = spec.files[spec.path].splitlines()
    patch = f"diff --git a/{spec.path} b/{spec.path}\n--- a/{spec.path}\n+++ b/{spec.path}\n"
    patch += f"@@ -1,{len(lines)} +1,{text.count(chr(10))} @@\n"
    patch += "".join(f"-{line}\n" for line in lines) + "".join(f"+{line}\n" for line in text.splitlines())
    verdict = await graded(instance, patch, tmp_path)
    assert verdict.kind is VerdictKind.UNRESOLVED and not verdict.fail_to_pass.failure
    assert any(name.startswith("hidden_") for name in verdict.pass_to_pass.failure)


@pytest.mark.parametrize("step", [120, pytest.param(1, marks=pytest.mark.slow)])
def test_each_bug_fails_the_tests_that_are_named_and_no_others(step: int, tmp_path: Path) -> None:
    """As the grading compares values, so that no task counts as solved without a fix. All rows take a minute."""
    wrong: list[str] = []
    for instance in [*repair_instances(3, "all"), *more_instances(3)][::step]:
        spec = spec_of(instance)
        for name, text in repository_files(spec).items():
            write_file(tmp_path / instance.instance_id / name, text, parents=True)
        item = json.dumps({"path": spec.path, "name": spec.function, "calls": spec.model_dump()["calls"]}).encode()
        command, folder = [sys.executable, calling.__file__], tmp_path / instance.instance_id
        done = subprocess.run(command, input=item, cwd=folder, capture_output=True, check=False)
        outcomes = json.loads(done.stdout) if done.stdout else [None] * len(spec.calls)
        bad = [not same(found, wanted) for found, wanted in zip(outcomes, spec.expected, strict=True)]
        file = instance.fail_to_pass[0].partition("::")[0]
        if instance.fail_to_pass != tuple(f"{file}::test_{at + 1}" for at in range(spec.shown) if bad[at]):
            wrong.append(instance.instance_id)
    assert wrong == []
