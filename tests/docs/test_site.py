"""The built site: its search answers a newcomer's questions. ``make docs`` makes the environment that builds it."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from page_session import ROOT

BUILDER = ROOT / ".venv-docs/bin"
AGENTS = (ROOT / "openhands_rl_plugin/AGENTS.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", AGENTS, re.MULTILINE)
# As somebody asks who has not read the pages, and does not know their words.
NEWCOMERS = {
    "How much disk space does pip need with CUDA?": "start/install",
    "Can I use this with Claude Code?": "tutorials/record",
    "How do I tell it that the agent solved my task?": "tutorials/judge",
    "Should I use PPO, GRPO or SFT?": "tutorials/train",
    "The new model is worse, how do I go back?": "tutorials/publish",
    "How many more tokens does tree search need?": "tutorials/search",
    "Is my fine-tuned model significantly better than before?": "tutorials/evaluate",
    "The reward does not go up, what is wrong?": "tutorials/loop",
    "Can I train on my own gym environment?": "howto/environments",
    "How do I train on my GitHub repository?": "howto/repository-tasks",
    "How do I train on several GPUs?": "howto/scale-out",
    "Is it safe to let the agent run shell commands on my laptop?": "howto/secrets-sandboxes",
    "Where does it save my data?": "reference/store",
}
pytestmark = pytest.mark.skipif(not (BUILDER / "zensical").exists(), reason="`make docs` makes .venv-docs")


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Counter[str]]]:
    """Address and words of every section of the search index."""
    made = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", made / "docs")
    shutil.copy(ROOT / ".zensical.toml", made)
    (made / "openhands_rl_plugin").symlink_to(ROOT / "openhands_rl_plugin")
    command = [BUILDER / "zensical", "build", "--strict", "-f", ".zensical.toml"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    items = json.loads((made / "build/docs/search.json").read_text())["items"]
    return [(item["location"], words(f"{item['title']} {item['title']} {item['text']}")) for item in items]


def words(text: str) -> Counter[str]:
    plain = html.unescape(re.sub(r"<[^>]+>", " ", text)).lower()
    return Counter(word.rstrip("s") for word in re.findall(r"[a-z0-9]{2,}", plain))


def found(sections: list[tuple[str, Counter[str]]], question: str, most: int = 5) -> list[str]:
    """Sections by BM25, as the site's own search ranks them."""
    asked = words(question)
    mean = sum(sum(counts.values()) for _, counts in sections) / len(sections)
    rarity = {word: math.log(1 + len(sections) / (1 + sum(word in counts for _, counts in sections))) for word in asked}

    def score(counts: Counter[str]) -> float:
        length = 0.25 + 0.75 * sum(counts.values()) / mean
        return sum(rarity[word] * counts[word] * 2.2 / (counts[word] + 1.2 * length) for word in asked)

    return [at for at, counts in sorted(sections, key=lambda item: -score(item[1]))[:most]]


@pytest.mark.parametrize("question", NEWCOMERS)
def test_a_newcomers_question_leads_to_its_page(sections: list[tuple[str, Counter[str]]], question: str) -> None:
    assert any(at.startswith(NEWCOMERS[question]) for at in found(sections, question)), found(sections, question)


@pytest.mark.parametrize(("question", "file", "name"), QUESTIONS, ids=[question for question, _, _ in QUESTIONS])
def test_a_developers_question_leads_to_its_file(
    sections: list[tuple[str, Counter[str]]], question: str, file: str, name: str
) -> None:
    at = found(sections, question)
    assert any(place.startswith("background/code") for place in at), at
    page = (ROOT / "docs/background/code.md").read_text(encoding="utf-8")
    assert f"| {question} | `{file}` | `{name}` |" in page


def test_every_page_is_in_the_index(sections: list[tuple[str, Counter[str]]]) -> None:
    there = {at.partition("#")[0].removesuffix(".html") for at, _ in sections}
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page != "index"} <= there
    assert Path(ROOT / "docs/index.md").exists()
