"""Every command and program of the documentation runs, as it is written, in an empty home."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from broken_repository import units_repository
from page_session import DOCS, NEEDS, ROOT, Session, blocks, language_of, missing
from train_store import store_of

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.backends import find_uv
from openhands_rl_plugin.testing import example_trajectory

RUN = ("console", "python")
DATA = ROOT / "tests/trajectories/exchange/data"
# The tiny model's calls are native, and its answers short.
CHANGES = {
    "native_tool_calling = false": "native_tool_calling = true",
    "max_response_length = 4096": "max_response_length = 64",
    "--algorithm sft": "--algorithm sft --set training.num_epochs=1",
    "--model smollm2-135m": "--model ./model",
}


def fixer(folder: Path) -> None:
    """``./model``: a tiny model that mends the file of the tutorial by one command, and then says that it is done.

    Its tokenizer knows OpenHands' words, so that prompts are as short as those of a real one.
    """
    from fixing_model import write_chooser

    texts = [path.read_text() for path in (DATA / "golden_system_prompt.txt", DATA / "codeact_v2_tools.json")]
    shell = "execute_bash" if NEEDS["v0"] else "terminal"
    mend = {"name": shell, "arguments": {"command": "sed -i 's/a - b/a + b/' calc.py 2>/dev/null; echo done"}}
    done = {"name": "finish", "arguments": {"message": "Done."}}
    first, again = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in (mend, done))
    write_chooser(folder / "model", [first], again, texts)


def store(folder: Path) -> None:
    """``./trajectories``: two episodes."""

    store_of(folder / "trajectories", example_trajectory(0), example_trajectory(1))


def foreign(folder: Path) -> None:
    """``./trajectories``, and ``./runs`` of another agent: four rows of SWE-Gym."""
    store(folder)
    row = json.loads((DATA / "sampled_row.json").read_text())
    rows = (row | {"instance_id": f"repo__repo-{number}"} for number in range(4))
    (folder / "runs").mkdir()
    (folder / "runs/train.raw.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def seller(folder: Path) -> None:
    """``./model``: asks the tool of the page for a price, and says it."""
    from fixing_model import write_chooser

    call = {"name": "price", "arguments": {"product": "lamp"}}
    write_chooser(folder / "model", [f"<tool_call>\n{json.dumps(call)}\n</tool_call>"], "It costs 18.50 dollars.")


def repository(folder: Path) -> None:
    """``./my-repository``: a package with tests. pytest for it comes from the package index, or from uv's cache."""
    try:
        asked = [find_uv(), "pip", "compile", "--quiet", "-"]
    except ConfigError as error:
        pytest.skip(str(error))
    if subprocess.run(asked, input="pytest==8.4.2", capture_output=True, text=True, cwd=folder).returncode:
        pytest.skip("no package index is within reach")
    units_repository(folder / "my-repository")


def learnt(session: Session) -> None:
    """The quickstart's program prints that it does better than before."""
    shown = re.search(r"held-out countries: ([\d.]+) before, ([\d.]+) after", "".join(session.printed))
    assert shown and float(shown[2]) >= float(shown[1]) + 0.3, shown
    assert (session.folder / "capitals/trajectories").is_dir()


def searched(session: Session) -> None:
    """What the page says of its table: a search spends more."""
    rows = re.findall(r"^(StandardReAct|BestOfN|MCTS) .*?([\d,]+) +[\w_]+ \d", "".join(session.printed), re.MULTILINE)
    spent = {strategy: int(sampled.replace(",", "")) for strategy, sampled in rows}
    assert 0 < spent["StandardReAct"] < spent["BestOfN"] < spent["MCTS"], spent


def nothing(_: Path | Session) -> None:
    """No model, and no more than what the page shows."""


@dataclass(frozen=True)
class Story:
    """Pages that are read one after another, in one folder."""

    pages: tuple[str, ...]
    supply: Callable[[Path], None] = nothing
    check: Callable[[Session], None] = nothing


TUTORIALS = tuple(f"tutorials/{name}.md" for name in ("record", "judge", "train", "publish"))
STORIES = {
    "readme": Story(("../README.md",), fixer),
    "home": Story(("index.md",), fixer),
    "v0": Story(("openhands-v0.md",), fixer),
    "quickstart": Story(("start/quickstart.md",), check=learnt),
    "tutorials": Story((*TUTORIALS, "howto/any-agent.md"), fixer),
    "worlds": Story(tuple(f"tutorials/{name}.md" for name in ("search", "evaluate", "loop")), check=searched),
    "http": Story(("reference/http.md",), fixer),
    "tools": Story(("howto/tools.md",), seller),
    "trainers": Story(("howto/trainers.md", "howto/trainer-recipes.md"), fixer),
    "studio": Story(("howto/studio.md",), store),
    "repository tasks": Story(("howto/repository-tasks.md",), repository),
}
# Seconds each: no model is made.
FAST = {
    "install": Story(("start/install.md",)),
    "plugins": Story(("howto/plugins.md", "howto/plugin-packages.md")),
    "sandboxes": Story(("howto/secrets-sandboxes.md",)),
    "store": Story(("reference/store.md",), store),
    "import and export": Story(("howto/import-export.md",), foreign),
    "environments": Story(("howto/environments.md",)),
}
COVERED = {page for story in (*STORIES.values(), *FAST.values()) for page in story.pages}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STORIES)
def test_a_story_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert play(STORIES[name], tmp_path)


@pytest.mark.parametrize("name", FAST)
def test_a_page_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    assert play(FAST[name], tmp_path)


def play(story: Story, folder: Path) -> int:
    """The number of blocks that ran. Skips where this environment can run none of them."""
    pages = [(DOCS / page).resolve() for page in story.pages]
    needed = {missing(example) for page in pages for example in blocks(page) if language_of(example) in RUN}
    if needed and "" not in needed:
        pytest.skip(f"{', '.join(story.pages)}: every block needs what is not here: {'; '.join(sorted(needed))}")
    story.supply(folder)
    with Session(folder, CHANGES) as session:
        ran = sum(session.play(page) for page in pages)
        story.check(session)
    return ran


def test_every_page_with_commands_or_programs_belongs_to_a_story() -> None:
    covered = {(DOCS / page).resolve() for page in COVERED}
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    with_examples = {page for page in pages if any(language_of(each) in RUN for each in blocks(page))}
    # The guide for V1 has tests of its own (tests/hosts/v1/test_guide.py): its programs need servers and editors.
    assert with_examples - covered <= {DOCS / "openhands-v1.md"}
