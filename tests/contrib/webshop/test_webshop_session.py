"""One episode: pages as WebShop shows them, and what happens to actions that make no sense."""

from __future__ import annotations

import hashlib

import pytest

from openhands_rl_plugin.contrib.webshop import WebShop, WebShopSession, oracle_actions

TRANSCRIPT_SHA256 = "bbf36f05c291109bd3fef04593fa4acc032217bb940d06fb841e7f6923c5300b"
WORLD = WebShop(results_per_page=5)


def new_session(goal_index: int = 3) -> WebShopSession:
    return WORLD.session(goal_index)


def at_an_item() -> WebShopSession:
    session = new_session()
    session.step("search[organic granola bars]")
    session.step(f"click[{session.page.clickables[-1]}]")
    return session


def test_a_fixed_transcript_never_changes() -> None:
    lines: list[str] = []
    for index in (0, 3, 1200, 1499):
        session = new_session(index)
        lines.append(session.observation)
        for action in ("search[]", "click[Next >]", *oracle_actions(WORLD, index)):
            result = session.step(action)
            lines += (action, result.state, str(result.reward))
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == TRANSCRIPT_SHA256


def test_the_pages_have_webshops_form() -> None:
    session = new_session()
    request = session.goal.instruction
    assert session.observation == f"WebShop [SEP] Instruction: [SEP] {request} [SEP] Search"
    results = session.step("search[organic granola bars]").state
    first = WORLD.index.search("organic granola bars")[0]
    assert results.startswith(
        f"Instruction: [SEP] {request} [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] "
        f"{first.asin} [SEP] {first.title} [SEP] ${first.price} [SEP] "
    )
    item = session.step(f"click[{first.asin}]").state
    options = " [SEP] ".join(" [SEP] ".join((group.name, *group.values)) for group in first.options)
    end = (
        f"{first.title} [SEP] Price: ${first.price} [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] "
        "Reviews [SEP] Attributes [SEP] Buy Now"
    )
    start = f"Instruction: [SEP] {request} [SEP] Back to Search [SEP] < Prev [SEP] {options} [SEP] "
    assert item == start + end
    group = first.options[0]
    assert session.step(f"click[{group.values[0]}]").state == (
        f"{start}Selected: {group.name}={group.values[0]} [SEP] {end}"
    )
    final = session.step("click[Buy Now]")
    assert final.state.startswith("Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0): ")
    assert final.info is not None and final.info.asin == first.asin
    assert final.info.options == ((group.name, group.values[0]),)


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ("", "'' is neither search[keywords] nor click[value]"),
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
    session = WebShop(max_steps=3).session(0)
    results = [session.step("search[tea]") for _ in range(3)]
    assert [(r.done, r.truncated) for r in results] == [(False, False), (False, False), (True, True)]
    assert session.purchase is None


def test_a_fork_goes_its_own_way() -> None:
    session = at_an_item()
    before = session.observation
    fork = session.fork()
    assert fork.step("click[Buy Now]").done
    assert (session.observation, session.done, session.steps) == (before, False, 2)
    assert session.step("click[< Prev]").state != before
