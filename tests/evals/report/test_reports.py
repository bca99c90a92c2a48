"""Figures and comparisons: against what is known from books, from other code's files, and by properties."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_data import data_of

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.runs.run_files import Outcome, RunRecord, compare, figures_of, mcnemar, sign_permutation
from openhands_rl_plugin.evals.swe.instances import VerdictKind

RESOLVED, UNRESOLVED = VerdictKind.RESOLVED, VerdictKind.UNRESOLVED


def run(index: int, kinds: Sequence[VerdictKind], name: str = "run", **more) -> RunRecord:
    """A run over tasks t0, t1, ..."""
    outcomes = tuple(Outcome(instance_id=f"t{at}", run=index, kind=kind, **more) for at, kind in enumerate(kinds))
    return RunRecord(name=name, index=index, directory=Path(f"/runs/{name}-run_{index}"), outcomes=outcomes)


def write(folder: Path, rows: Sequence[dict], metadata: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "output.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if metadata is not None:
        (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def row_of(name: str, kind: VerdictKind) -> dict:
    return {"instance_id": name, "test_result": {"git_patch": "x", "outcome": {"instance_id": name, "kind": kind}}}


def test_what_is_unknown_is_in_no_rate_of_success():
    kinds = [RESOLVED, UNRESOLVED, VerdictKind.TIMED_OUT, VerdictKind.INFRASTRUCTURE, VerdictKind.FAILED]
    (group,) = figures_of([run(0, kinds)])
    assert group.pass_at_1.mean == pytest.approx(1 / 3) and group.pass_at_1.n == 3
    assert group.runs == ({"index": 0, "resolved": 1, "known": 3},) and group.attempts == 5
    assert group.kinds["infrastructure"] == group.kinds["failed"] == group.kinds["timed_out"] == 1


def test_several_runs_are_one_group_with_pass_at_k():
    (group,) = figures_of([run(0, [RESOLVED, UNRESOLVED]), run(1, [UNRESOLVED, UNRESOLVED])])
    assert [(each.k, each.estimate.mean) for each in group.pass_at_k] == [(1, 0.25), (2, 0.5)]
    assert group.pass_at_1.mean == 0.25
    assert len(figures_of([run(0, [RESOLVED]), run(0, [RESOLVED], "other")])) == 2


@pytest.mark.parametrize(
    ("gained", "lost", "expected"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (10, 2, 0.03857421875)]
)
def test_mcnemar_against_the_binomial(gained: int, lost: int, expected: float):
    assert mcnemar(gained, lost) == pytest.approx(expected) == mcnemar(lost, gained)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), max_size=7))
def test_sign_permutation_is_exact(differences: list[float]):
    moved = [each for each in differences if each]
    sums = [abs(sum(a * b for a, b in zip(moved, signs, strict=True))) for signs in product((1, -1), repeat=len(moved))]
    expected = sum(each >= abs(sum(moved)) - 1e-12 for each in sums) / len(sums)
    assert sign_permutation(differences) == pytest.approx(expected)


def test_a_comparison_is_over_tasks_of_both():
    before = run(0, [UNRESOLVED] * 6 + [RESOLVED, VerdictKind.INFRASTRUCTURE], "before")
    after = run(0, [RESOLVED] * 6 + [UNRESOLVED], "after")
    found = compare([before], [after])
    assert (found.tasks, found.only_first, found.only_second, found.test) == (7, 0, 0, "exact McNemar")
    assert found.p_value == pytest.approx(mcnemar(6, 1)) and len(found.gained) == 6 and found.lost == ("t6",)
    assert found.difference.mean == pytest.approx(5 / 7) and found.difference.low > 0
    repeated = compare([before, run(1, [UNRESOLVED] * 7, "before")], [after, run(1, [RESOLVED] * 7, "after")])
    assert repeated.test == "paired permutation" and 0 < repeated.p_value < 0.1
    with pytest.raises(ConfigError, match="no graded task in common"):
        compare([before], [RunRecord(name="x", index=0, directory=Path("/x"))])


def test_sides_are_named_by_what_differs(tmp_path: Path):
    rows = [row_of("t0", RESOLVED)]

    def side(agent: str, note: str = "v1", **details: object) -> Path:
        name = f"qwen_maxiter_50_N_{note}-run_0"
        metadata = {"agent_class": agent, "llm_config": {"model": "openai/qwen"}, "details": {"seed": 0, **details}}
        return write(tmp_path / f"out{len(list(tmp_path.iterdir()))}" / agent / name, rows, metadata)

    stock, plain = side("CodeActAgent"), side("RLAgent", strategy="StandardReAct")
    best, noted = side("RLAgent", strategy="BestOfN", strategy_options={"n": 4}), side("CodeActAgent", "v2")
    for one, other, expected in (
        (plain, best, ("StandardReAct", 'BestOfN {"n": 4}')),
        (stock, noted, ("qwen_maxiter_50_N_v1", "qwen_maxiter_50_N_v2")),
    ):
        assert main(["evaluate", "--compare", str(one), str(other), "--out", str(tmp_path / "both")]) == 0
        found = json.loads((tmp_path / "both/report.json").read_text())
        named = (found["comparison"]["first"], found["comparison"]["second"])
        assert all(part in name for name, part in zip(named, expected, strict=True)), named
        assert [group["label"] for group in found["groups"]] == list(named)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    metadata = {"agent_class": "RLAgent", "llm_config": {"model": "m"}, "dataset": "d", "data_split": "test"}
    for name, resolved in (("a", [False, False, True]), ("b", [True, True, True])):
        for number in range(2):
            rows = [row_of(f"<t{at}>", RESOLVED if each else UNRESOLVED) for at, each in enumerate(resolved)]
            write(tmp_path / name / f"m_maxiter_5_N_{name}-run_{number}", rows, metadata)
    assert main(["evaluate", "--report", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 0
    compared = capsys.readouterr().out
    assert "0.333" in compared and "pass@1" in compared and "4 unresolved" in compared
    page = data_of(tmp_path / "out" / "report.html")
    (group,) = page["evaluations"]["groups"]
    assert dict(group["rows"])["pass@1"] == "0.333" and dict(group["rows"])["model"] == "m"
    assert [each["k"] for each in group["pass_at_k"]] == [1, 2] and group["kinds"]["unresolved"] == 4
    names = [each["name"] for each in page["evaluations"]["evaluations"]]
    assert page[f"evaluations/{names[0]}"]["instances"]["kind"] == ["unresolved", "unresolved", "resolved"]
    assert page[f"evaluations/{names[0]}?<t0>"]["patch"] == "x" and page["export"]["left_out"] == []
    assert json.loads((tmp_path / "out" / "report.json").read_text())["groups"][0]["pass_at_1"]["n"] == 3
    sides = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["evaluate", "--compare", *sides, "--out", str(tmp_path / "both")]) == 0
    found = json.loads((tmp_path / "both/report.json").read_text())
    assert found["comparison"]["gained"] == ["<t0>", "<t1>"] and found["comparison"]["test"] == "paired permutation"
    compared = dict(data_of(tmp_path / "both" / "report.html")["evaluations"]["comparison"])
    assert compared["solved more often"] == "2: <t0>, <t1>" and "paired permutation" in compared["p-value"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{json.dumps(row_of('a', RESOLVED))}\n{{broken\n", "line 2 is not JSON"),
        (None, "no run of an evaluation"),
        ('{"instance_id": "a", "test_result": {"report": {"resolved": true}}}\n', "`openhands-rl import`"),
    ],
)
def test_bad_files_are_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, expected: str
):
    if content is not None:
        (tmp_path / "output.jsonl").write_text(content)
    assert main(["evaluate", "--report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert expected in error and len(error.splitlines()) == 1
