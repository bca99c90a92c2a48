"""A store that is filled once, and one browser for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import missing_browser
from seeded_store import seed
from studio_pages import Pages, pages_of


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with ``store`` and ``tokenizer``."""
    folder = tmp_path_factory.mktemp("seeded")
    seed(folder, samples=4)
    return folder


@pytest.fixture(scope="module")
def pages(seeded: Path) -> Iterator[Pages]:
    if missing := missing_browser():
        pytest.skip(f"THE STUDIO'S PAGES ARE NOT TESTED: {missing}")
    with pages_of(seeded / "store", tokenizer=str(seeded / "tokenizer")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_to_complain_of(request: pytest.FixtureRequest) -> Iterator[None]:
    """No page says an error, asks another host, or does what its policy forbids."""
    yield
    if "pages" in request.fixturenames:
        pages: Pages = request.getfixturevalue("pages")
        found, pages.problems = pages.problems + pages.violations(), []
        assert found == []
