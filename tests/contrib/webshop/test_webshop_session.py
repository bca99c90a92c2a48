"""One episode: pages as WebShop shows them, and what happens to actions that make no sense."""

from __future__ import annotations

import hashlib

import pytest

from openhands_rl_plugin.contrib.webshop import WebShop, WebShopSession, oracle_actions

TRANSCRIPT_SHA256 = "752a101b51ea1e19cd5e75da5b8ba03fb0a18d2d0caf4fff636fccd5641852da"
WORLD = WebShop()


def new_session(goal_index: int = 3) -> WebShopSession:
    return WORLD.session(goal_index)


def test_a_fixed_transcript_never_changes() -> None:
    lines: list[str] = []
    for index in (0, 3, 1200, 1499):
        session = new_session(index)
        lines.append(session.observation)
        for action in ("search[]", "click[Next >]", *oracle_actions(WORLD, index)):
            result = session.step(action)
            lines += (action, result.state, str(result.reward))
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == TRANSCRIPT_SHA256


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ("buy it", "'buy it' is neither"),
        ("search[ ]", "search[] is empty"),
        ("click[Search]", "a search needs keywords"),
        ("click[Buy Now]", "there is no 'Buy Now' to click here"),
        ("x" * 5000, "'" + "x" * 57 + "...' is neither"),
    ],
)
def test_a_bad_action_is_explained_and_counts_as_a_step(action: str, complaint: str) -> None:
    session = new_session()
    result = session.step(action)
    assert result.state.startswith("Invalid action: ") and complaint in result.state
    assert result.state.endswith("You can search[keywords]")
    assert (result.reward, result.done, session.steps) == (0.0, False, 1)
    assert session.page == new_session().page


def test_the_step_limit_truncates() -> None:
    session = WORLD.session(0)
    results = [session.step("search[tea]") for _ in range(15)]
    assert [(r.done, r.truncated) for r in results[-2:]] == [(False, False), (True, True)]
    assert session.purchase is None


CATALOGUE_SHA256 = "80b98b7d1127683b3c0a3dca32d085d47a405a53596fa7b65aba71ee04a10848"
GOALS_SHA256 = "593db8cfcd43f55d1055947030a4a8ac5effec7d2568e375525b7a207b4dc4d6"


def test_catalogue_and_goals_never_change() -> None:
    found = [hashlib.sha256(repr(each).encode()).hexdigest() for each in (WORLD.products, WORLD.goals)]
    assert found == [CATALOGUE_SHA256, GOALS_SHA256]


def test_the_oracle_meets_every_goal() -> None:
    for goal in WORLD.goals[::5]:
        session = WORLD.session(goal.index)
        results = [session.step(action) for action in oracle_actions(WORLD, goal.index)]
        assert results[-1].reward == 1.0 and results[-1].done and not results[-1].truncated, goal
