"""The pages in a real browser, full of what models could write: shown as text, nothing runs, nothing is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import needs_browser, opened
from hostile import ACTED_UPON, CONTROLS, MARKUP, TEXT

from openhands_rl_plugin.evals.report.comparison import compare
from openhands_rl_plugin.evals.report.figures import figures_of
from openhands_rl_plugin.evals.report.page import write_report
from openhands_rl_plugin.evals.report.run_records import RunRecord
from openhands_rl_plugin.evals.runs.outcome import Outcome, OutcomeKind


def evaluation_page(folder: Path) -> Path:
    names = [*MARKUP, *CONTROLS]

    def runs(name: str, solved: int) -> list[RunRecord]:
        kinds = [OutcomeKind.RESOLVED if at < solved else OutcomeKind.UNRESOLVED for at in range(len(names))]
        outcomes = [Outcome(instance_id=names[at], run=0, kind=kind) for at, kind in enumerate(kinds)]
        return [
            RunRecord(name=name, index=index, directory=folder / str(index), outcomes=tuple(outcomes))
            for index in range(2)
        ]

    folders = TEXT.replace("/", "|")  # these names are those of folders
    first, second = runs(folders, 3), runs("\u202e" + folders, 20)
    write_report(folder, figures_of([*first, *second]), compare(first, second))
    return folder / "report.html"


PAGES = {"evaluate": evaluation_page}


@pytest.mark.parametrize("name", PAGES)
def test_no_page_holds_a_character_that_turns_or_hides_text(name: str, tmp_path: Path) -> None:
    page = PAGES[name](tmp_path).read_text(encoding="utf-8")
    assert not set(page) & ACTED_UPON
    assert "\\u202egnp.exe" in page and "<script" not in page and not re.search(r"\sstyle=", page)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("policy", [True, False], ids=["as it is", "without its policy"])
def test_nothing_on_a_page_runs_or_is_loaded(name: str, policy: bool, tmp_path: Path) -> None:
    file = PAGES[name](tmp_path)
    if not policy:  # the escaping alone has to do
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", text), encoding="utf-8")
        assert "Content-Security-Policy" not in file.read_text(encoding="utf-8")
    with opened() as seen:
        text = seen.open(file)
        assert seen.asked == [file.as_uri()] and seen.page.url == file.as_uri()
        assert seen.said == [], "the policy allows what the page needs: its own style"
        assert seen.page.evaluate("window.owned") is None
        foreign = "script, img, a, iframe, object, embed, form, input, button, link, base, [onload], [onerror], [href]"
        assert seen.page.query_selector_all(foreign) == []
        assert "<script>window.owned=1" in text and "<img src=x onerror=window.owned=1>" in text
        assert seen.page.evaluate("getComputedStyle(document.body).maxWidth") == "900px"


@needs_browser
@pytest.mark.slow
def test_the_policy_stops_what_would_not_be_escaped(tmp_path: Path) -> None:
    """So that the test above can fail, and the second wall is one."""
    file = evaluation_page(tmp_path)
    page = file.read_text(encoding="utf-8")
    hole = "<script>window.owned=1</script><img src='http://127.0.0.1:1/x' onerror='window.owned=2'>"
    for kept, owned in ((True, {None}), (False, {1, 2})):
        text = page if kept else re.sub(r"<meta http-equiv=[^>]*>", "", page)
        file.write_text(text.replace("</body>", f"{hole}</body>"), encoding="utf-8")
        with opened() as seen:
            seen.open(file)
            assert (
                seen.page.evaluate("window.owned") in owned if not kept else seen.page.evaluate("window.owned") is None
            )
