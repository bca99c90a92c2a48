"""The list and an episode by keyboard alone; what is looked at is in the address."""

from __future__ import annotations

from studio_pages import Pages


def test_the_keyboard_leads_from_the_list_through_the_views_of_an_episode(pages: Pages) -> None:
    page = pages.open("/", wait=".row:not(.head) a")
    assert page.locator(".strip .count").inner_text().endswith("episodes")
    pages.keys("j", "j")
    page.wait_for_function("() => location.search === '?n=1'")
    pages.keys("Enter")
    page.wait_for_selector(".item .call, .item .text")
    first = page.url.split("?")[0]
    assert page.locator(".item.assistant").count() > 0
    pages.keys("ArrowRight", "ArrowRight")
    page.wait_for_selector(".item.here")
    pages.keys("t")
    page.wait_for_selector("svg .point.here")
    pages.keys("o")
    page.wait_for_selector(".t")
    pages.keys("n")
    page.wait_for_selector(".t.at")
    assert "view=tokens" in page.url and "tokens=" in page.url and "node=" in page.url
    pages.keys("j")
    page.wait_for_function("first => !location.href.startsWith(first)", arg=first)
    page.wait_for_selector(".t")
    pages.keys("?")
    assert "next outlier" in page.locator("dialog[open]").inner_text()
