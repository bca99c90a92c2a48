"""Instances and predictions from files, good ones and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.instances import instance_of, read_instances, read_predictions, row_of

ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0123",
    "version": "1.0",
    "FAIL_TO_PASS": ["t::x"],
    "PASS_TO_PASS": '["t::y", "t::z"]',
    "difficulty": "hard",
    "hints_text": None,
}


# The names of SWE-bench Pro's columns, of which all but the patches are text.
PRO = {
    "repo": "NodeBB/NodeBB",
    "instance_id": "instance_NodeBB__NodeBB-04998908ba6721d64eba79ae3b65a351dcfbc5b5-vnan",
    "base_commit": "1e137b07052bc3ea0da44ed201702c94055b8ad2",
    "problem_statement": "Email validation status is wrong",
    "interface": None,
    "fail_to_pass": "['test/database.js | Test database keys.js::Key methods should return multiple keys']",
    "pass_to_pass": """["test/user.js | User should say it's taken", 'test/user.js | User "x" should be, y']""",
    "selected_test_files_to_run": '["test/database.js"]',
}


def test_official_columns_and_those_of_pro() -> None:
    instance = instance_of(ROW)
    assert instance.fail_to_pass == ("t::x",) and instance.pass_to_pass == ("t::y", "t::z")
    assert instance.extra == {"difficulty": "hard"} and instance.hints_text == ""
    pro = instance_of(PRO)
    assert [name[-5:] for name in (*pro.fail_to_pass, *pro.pass_to_pass)] == [" keys", "taken", "be, y"]
    assert {*pro.extra} == {"interface", "selected_test_files_to_run"}
    for each in (instance, pro):
        assert instance_of(json.loads(json.dumps(row_of(each)))) == each


@pytest.mark.parametrize("form", ["jsonl", "json list", "json object", "parquet"])
def test_files(tmp_path: Path, form: str) -> None:
    other = {**ROW, "instance_id": "a__b-2"}
    file = tmp_path / f"rows.{form.split()[0]}"
    if form == "jsonl":
        file.write_text("\n".join(map(json.dumps, (ROW, other))) + "\n\n")
    elif form == "json list":
        file.write_text(json.dumps([ROW, other]))
    elif form == "json object":
        file.write_text(json.dumps({row["instance_id"]: row for row in (ROW, other)}))
    else:
        datasets.Dataset.from_list([ROW, other]).to_parquet(file)
    assert [each.instance_id for each in read_instances(file)] == ["a__b-1", "a__b-2"]
    assert read_instances(file)[0] == instance_of(ROW)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no instance in it"),
        ("{", "rows.jsonl:1: not valid JSON"),
        ("[1]", "must be a JSON object, not int"),
        ('{"instance_id": "x"}', "column repo, base_commit is missing"),
        (json.dumps({**ROW, "FAIL_TO_PASS": "[" * 9999}), "column FAIL_TO_PASS must be a list of test names"),
        (json.dumps({**ROW, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": None}), "name no test"),
        (json.dumps({**ROW, "instance_id": "../x"}), "cannot name a folder"),
        (f"{json.dumps(ROW)}\n{json.dumps(ROW)}", "rows.jsonl:2: a__b-1 is there twice"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_instances(file)
    assert why in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="there is no such file; give a"):
        read_instances(tmp_path / "none.jsonl")


def test_predictions(tmp_path: Path) -> None:
    instances = [instance_of({**ROW, "patch": "p"})]
    rows = [
        {"instance_id": "a__b-1", "model_patch": "x", "model_name_or_path": "org/m"},
        {"instance_id": "another", "model_patch": "x"},
        {"instance_id": "a__b-1", "model_patch": None},
        {"instance_id": "a__b-1", "model_patch": "z", "model_name_or_path": "org__m"},
    ]
    file = tmp_path / "preds.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = [(each.model_name_or_path, each.model_patch) for each in read_predictions(str(file), instances)]
    assert found == [("org__m", "z"), ("None", None)]
    assert read_predictions("gold", instances)[0].model_patch == "p"
    for bad in ({"model_patch": "x"}, {**rows[0], "model_patch": 7}, {**rows[0], "model_name_or_path": ".."}):
        (tmp_path / "bad.json").write_text(json.dumps({"a__b-1": bad}))
        with pytest.raises(ConfigError, match=r"bad.json: PatchPrediction\.\w+: "):
            read_predictions(str(tmp_path / "bad.json"), instances)
