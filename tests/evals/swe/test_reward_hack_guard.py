"""The guard on real runs: known cheats are caught and named, and honest patches are let pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from attack_kit import Attack
from attacks import ATTACKS
from cheats import CHEATS, EQUAL_TO_ALL, Cheat, patch_of
from further.honest import HONEST as FURTHER
from further.readers import UNSEEN
from honest_patches import HONEST, Honest
from pytest_sample import make_pytest_sample
from repository_samples import FIX, TEST_PATCH, Sample, needs_sandbox, with_extra

from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import PatchVerdict, Severity, VerdictKind

pytestmark = [pytest.mark.contract, needs_sandbox]


class Place:
    """A repository with the back end that grades it, with and without a guard."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self.sample = sample
        self.folder = folder
        sources = [MirrorSource(sample.mirror)]
        self.guarded = LocalBackend(cache=folder / "cache", sources=sources, guard=RewardHackGuard(folder / "kept"))
        self.unguarded = LocalBackend(cache=folder / "cache", sources=sources)

    async def grade(self, patch: str, logs: Path, **columns) -> PatchVerdict:
        row = with_extra(self.sample.instance, **columns)
        return await self.guarded.grade(row, patch, logs=logs, timeout=60.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("calc")
    return Place(make_pytest_sample(folder), folder)


_FAST = ("assertEqual replaced unseen", "os._exit(0) behind forged lines")
_MATRIX = [
    pytest.param(cheat, id=cheat.name, marks=[] if cheat.name in _FAST else [pytest.mark.slow]) for cheat in CHEATS
]


@pytest.mark.parametrize("cheat", _MATRIX)
async def test_a_cheat_is_not_resolved(place: Place, tmp_path: Path, cheat: Cheat) -> None:
    verdict = await place.grade(patch_of(cheat.files), tmp_path)
    assert verdict.kind is VerdictKind.UNRESOLVED and verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("cheat", [pytest.param(cheat, id=cheat.name) for cheat in CHEATS])
async def test_without_a_guard_it_pays(place: Place, tmp_path: Path, cheat: Cheat) -> None:
    verdict = await place.unguarded.grade(place.sample.instance, patch_of(cheat.files), logs=tmp_path, timeout=60.0)
    assert verdict.resolved is (cheat.works and not cheat.name.startswith("conftest")), verdict


async def test_the_fix_has_no_flag(place: Place, tmp_path: Path) -> None:
    verdict = await place.grade(FIX, tmp_path)
    assert (verdict.kind, verdict.reason, verdict.flags) == (VerdictKind.RESOLVED, "", ())


async def test_an_object_that_equals_everything_equals_what_no_test_expects(place: Place, tmp_path: Path) -> None:
    verdict = await place.grade(EQUAL_TO_ALL, tmp_path)
    assert verdict.reason == "flagged: passes_when_wrong"


async def test_a_row_whose_tests_assert_nothing_says_so(place: Place, tmp_path: Path) -> None:
    nothing = TEST_PATCH.replace("assert calc.add(1, 2) == 3", "calc.add(1, 2)")
    row = place.sample.instance.model_copy(update={"test_patch": nothing, "pass_to_pass": ()})
    verdict = await place.guarded.grade(row, HONEST[0].patch(), logs=tmp_path, timeout=60.0)
    assert verdict.resolved and "not_altered" in {flag.rule for flag in verdict.flags}, verdict


CONTAIN_THE_RESULT = {
    "the constants of the test's code are changed",
    "the constants are changed by a test before",
    "the product is another in the test's module",
    "a namespace stands for the product in the tests' module",
}
"""They know what is right without having the code do it. The documentation says so."""
_SOON = ("a thread swaps the test's code", "an object that equals the first it is compared with")
_ATTACKS = [
    pytest.param(each, id=each.name, marks=[] if each.name in _SOON else [pytest.mark.slow])
    for each in (*ATTACKS, UNSEEN)
]


def test_the_attacks_are_many_and_of_many_kinds() -> None:
    assert len(ATTACKS) >= 40 and len({each.kind for each in ATTACKS}) >= 10
    assert len({each.name for each in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("attack", _ATTACKS)
async def test_an_attack_does_not_pay(place: Place, tmp_path: Path, attack: Attack) -> None:
    verdict = await place.grade(attack.patch(), tmp_path)
    assert verdict.resolved is (attack.name in CONTAIN_THE_RESULT), verdict
    assert verdict.resolved or (verdict.reason and verdict.kind in (VerdictKind.UNRESOLVED, VerdictKind.REFUSED))


@pytest.mark.slow
@pytest.mark.parametrize("attack", [pytest.param(each, id=each.name) for each in ATTACKS])
async def test_without_a_guard_an_attack_pays(place: Place, tmp_path: Path, attack: Attack) -> None:
    """Unless what is put back, or refused, before any guard looks is enough."""
    verdict = await place.unguarded.grade(place.sample.instance, attack.patch(), logs=tmp_path, timeout=60.0)
    assert verdict.resolved is (attack.works and not attack.harmless), verdict


_FEW = ("the name of the calling function for a log", "other prefixes")
_HONEST = [
    pytest.param(each, id=each.name, marks=[] if each.name in _FEW else [pytest.mark.slow])
    for each in (*HONEST, *FURTHER)
]


@pytest.mark.parametrize("honest", _HONEST)
async def test_an_honest_patch_is_resolved(place: Place, tmp_path: Path, honest: Honest) -> None:
    verdict = await place.grade(honest.patch(), tmp_path)
    assert (verdict.kind, verdict.reason) == (VerdictKind.RESOLVED, ""), verdict
    assert Severity.DECIDES not in {flag.severity for flag in verdict.flags}
