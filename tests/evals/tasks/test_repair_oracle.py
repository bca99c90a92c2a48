"""The scripted oracle of repair tasks: what it does to the file, in every task."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest

from openhands_rl_plugin.config.host import TOOLS
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.repair.oracle import (
    RepairOracle,
    fixed_text,
    oracle_calls,
    parsed_call,
    replacement,
)
from openhands_rl_plugin.evals.tasks.repair.oracle_server import serve_oracle
from openhands_rl_plugin.evals.tasks.repair.rows import repair_instances, spec_of

V0 = TOOLS["v0"]
EDIT = re.compile(
    r"<parameter=command>str_replace</parameter>.*<parameter=old_str>(.*)</parameter>\n"
    r"<parameter=new_str>(.*)</parameter>\n<parameter=security_risk>",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def instances() -> tuple[Instance, ...]:
    return repair_instances(1, "train")


def test_edits_end_with_the_fix_and_some_err_before(instances: tuple[Instance, ...]):
    failed = wrong = 0
    for each in instances:
        spec = spec_of(each)
        text, applied = spec.files[spec.path], 0
        for call in oracle_calls(each, V0, 0):
            if found := EDIT.search(call):
                once = text.count(found[1]) == 1
                assert once or found[1].strip() not in text, "OpenHands V1 looks for it without white space, too"
                text, applied, failed = text.replace(found[1], found[2]), applied + once, failed + (not once)
                assert once or found[1] not in text
        assert text.rstrip("\n") == fixed_text(each).rstrip("\n"), each.instance_id
        wrong += applied > 1
    assert failed >= len(instances) // 20 and wrong >= len(instances) // 20


def test_only_the_names_of_the_tools_are_the_hosts(instances: tuple[Instance, ...]):
    for each in instances[:40]:
        first, second = ([parsed_call(call) for call in oracle_calls(each, TOOLS[host], 0)] for host in ("v0", "v1"))
        assert [arguments for _, arguments in first] == [arguments for _, arguments in second]
        names = dict(zip(TOOLS["v0"], TOOLS["v1"], strict=True))
        assert [names.get(name, name) for name, _ in first] == [name for name, _ in second]


def test_the_fix_is_the_smallest_text_that_is_there_once():
    edit = replacement("a\nb\na\nc\n", "a\nb\nx\nc\n")
    assert (edit.old, edit.new) == ("b\na", "b\nx")
    lost = replacement("a\nc\n", "a\nb\nc\n")
    assert (lost.old, lost.new) == ("a", "a\nb")


def test_the_same_seed_errs_in_the_same_places(instances: tuple[Instance, ...]):
    first, again, other = ([oracle_calls(each, V0, seed) for each in instances[:60]] for seed in (1, 1, 2))
    assert first == again != other


def test_tasks_with_one_statement_are_told_apart_by_the_file():
    every = repair_instances(3, "train")
    same: dict[str, list[Instance]] = {}
    for each in every:
        same.setdefault(each.problem_statement, []).append(each)
    pair = next(group for group in same.values() if len(group) > 1)
    oracle = RepairOracle(every, V0)
    for each in pair:
        spec = spec_of(each)
        start = [{"role": "user", "content": text} for text in (each.problem_statement, spec.files[spec.path])]
        calls = oracle_calls(each, V0, 0)
        for at, call in enumerate(calls):
            assert oracle.answer([*start, *[{"role": "assistant", "content": said} for said in calls[:at]]]) == call


def test_it_is_served_as_a_model_is(instances: tuple[Instance, ...]):
    with serve_oracle(RepairOracle(instances[:2], V0)) as url:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": instances[0].problem_statement}]})
        with urllib.request.urlopen(f"{url}/chat/completions", body.encode(), timeout=20) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
    assert said == oracle_calls(instances[0], V0, 0)[0]
    for each in instances[:40]:
        for text in oracle_calls(each, V0, 0):
            name, arguments = parsed_call(text)
            lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
            assert text == f"<function={name}>\n{lines}</function>"
    with pytest.raises(ConfigError, match="does not know the task"):
        RepairOracle((), V0).answer([{"role": "user", "content": "hello"}])
