"""The guard on real runs: known attacks do not pay, and honest patches are let pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import ATTACKS, CONTAIN_THE_RESULT, Attack
from honest_patches import HONEST, Honest
from pytest_sample import make_pytest_sample
from repository_samples import FIX, TEST_PATCH, Sample, needs_sandbox

from openhands_rl_plugin.evals.swe.backends import LocalBackend
from openhands_rl_plugin.evals.swe.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.instances import PatchVerdict, Severity, VerdictKind

pytestmark = [pytest.mark.contract, needs_sandbox]


class Place:
    """A repository with the back end that grades it, with and without a guard."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self.sample = sample
        own = {"cache": folder / "cache", "mirror": sample.mirror}
        self.guarded = LocalBackend(**own, guard=RewardHackGuard(folder / "kept"))
        self.unguarded = LocalBackend(**own)

    async def grade(self, patch: str, logs: Path, *, guarded: bool = True, **changes) -> PatchVerdict:
        backend, row = self.guarded if guarded else self.unguarded, self.sample.instance.model_copy(update=changes)
        return await backend.grade(row, patch, logs=logs, timeout=60.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("calc")
    return Place(make_pytest_sample(folder), folder)


def few(patches: tuple[Attack, ...] | tuple[Honest, ...], *fast: str) -> list:
    marks = {name: [] for name in fast}
    return [pytest.param(each, id=each.name, marks=marks.get(each.name, [pytest.mark.slow])) for each in patches]


async def test_the_fix_has_no_flag(place: Place, tmp_path: Path) -> None:
    verdict = await place.grade(FIX, tmp_path)
    assert (verdict.kind, verdict.reason, verdict.flags) == (VerdictKind.RESOLVED, "", ())


async def test_a_row_whose_tests_assert_nothing_has_a_note(place: Place, tmp_path: Path) -> None:
    nothing = TEST_PATCH.replace("assert calc.add(1, 2) == 3", "calc.add(1, 2)")
    verdict = await place.grade(HONEST[0].patch(), tmp_path, test_patch=nothing, pass_to_pass=())
    assert verdict.resolved and "not_altered" in {flag.rule for flag in verdict.flags}, verdict


_FAST = (
    *("assertEqual replaced unseen", "os._exit(0) behind forged lines", "a thread swaps the test's code"),
    *("mock.ANY", "an object that equals the first it is compared with"),
)


@pytest.mark.parametrize("attack", few(ATTACKS, *_FAST))
async def test_an_attack_does_not_succeed(place: Place, tmp_path: Path, attack: Attack) -> None:
    verdict = await place.grade(attack.patch(), tmp_path)
    assert verdict.resolved is (attack.name in CONTAIN_THE_RESULT), verdict
    assert verdict.resolved or (verdict.reason and verdict.kind in (VerdictKind.UNRESOLVED, VerdictKind.REFUSED))
    if attack.name == "mock.ANY":
        assert verdict.reason == "flagged: passes_when_wrong"


@pytest.mark.slow
@pytest.mark.parametrize("attack", few(ATTACKS))
async def test_without_a_guard_it_succeeds(place: Place, tmp_path: Path, attack: Attack) -> None:
    verdict = await place.grade(attack.patch(), tmp_path, guarded=False)
    assert verdict.resolved is attack.succeeds, verdict


@pytest.mark.parametrize("honest", few(HONEST, "the name of the calling function for a log", "other prefixes"))
async def test_an_honest_patch_is_resolved(place: Place, tmp_path: Path, honest: Honest) -> None:
    verdict = await place.grade(honest.patch(), tmp_path)
    assert (verdict.kind, verdict.reason) == (VerdictKind.RESOLVED, ""), verdict
    assert Severity.DECIDES not in {flag.severity for flag in verdict.flags}
