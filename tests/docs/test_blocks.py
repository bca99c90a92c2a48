"""What can be checked of every block of the documentation without running it: files, settings, commands, imports."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from page_session import DOCS, NEEDS, ROOT, blocks, commands, language_of, title_of
from sybil import Example

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import settings_from_sections, starting_config

README = ROOT / "README.md"
PAGES = [README, ROOT / "evaluation/README.md", *sorted(DOCS.rglob("*.md"))]
BLOCKS = [each for page in PAGES for each in blocks(page)]
DOCUMENTED = [each for each in BLOCKS if "evaluation" not in Path(each.path).parent.name]
KNOWN = {"console", "python", "toml", "yaml", "json", "sh", "text", "dockerfile"}
PROGRAMS = r"(\w+=\S+ )*(openhands-rl|python -m openhands|pip|uv pip|make|vllm|torchrun) "
# Commands that no test runs as they stand, and why. They are parsed by the real parsers.
NOT_RUN = {
    r"(uv )?pip install": "fetches packages",
    r"make ": "builds environments",
    r"vllm |torchrun ": "a GPU, or several",
    r"openhands-rl evaluate swe-": "hours",
    r"openhands-rl loop ": "hours",
    r"openhands-rl train --dry-run ": "a model's configuration; tests/evaluation/test_swe_gym_configs.py runs it",
    r"openhands-rl improve --repo ": "a repository of one's own, and hours; see tests/contrib/improve",
    r"openhands-rl demo --task repair": "hours; CI runs it with --tiny",
    r"openhands-rl rollouts serve ": "a model server and hours; tests/contrib/rollouts has what is behind it",
    r"openhands-rl watch ": "a model server with episodes; tests/contrib/watch has what is behind it",
    r"openhands-rl (train|score) .*verif": "judged episodes of many tasks",
    r"openhands-rl train .* --algorithm opd ": "a second model server; tests/training/trainer/test_teacher.py has one",
    r"openhands-rl (train .* --task|score .*better|export .* preferences)": "attempts; tests/hosts/v1 makes them",
    r"openhands-rl run ": "a terminal or an editor; tests/hosts/v1 has what is behind them",
    r"OPENHANDS_RL_API_KEY=": "an address of the network",
    r"openhands-rl grade preds.jsonl ": "images; tests/evals/swe/test_containers.py has what is behind it",
    r"openhands-rl list ./trajectories$": "after a benchmark's run",
}


def named(example: Example) -> str:
    return f"{Path(example.path).name}:{example.line}"


def of(language: str) -> list[Example]:
    return [each for each in BLOCKS if language_of(each) == language]


def lines_of(example: Example) -> list[str]:
    return [line.strip().removesuffix("&").strip() for line in example.parsed.replace("\\\n", " ").splitlines()]


def test_every_environment_gets_the_package_from_a_clone() -> None:
    """It is on no index."""
    loose = [each for each in BLOCKS if language_of(each) in ("sh", "console", "dockerfile")]
    assert [named(each) for each in loose if re.search(r"pip install.* '?openhands_rl_plugin\b", each.parsed)] == []


def lines() -> dict[str, str]:
    """Commands of blocks by their text: those that run, and those (``sh``, older guides) that are only looked at."""
    found: dict[str, str] = {}
    for each in BLOCKS:
        if language_of(each) == "console":
            texts = [command.removesuffix("&").strip() for command, _ in commands(each.parsed)]
        elif language_of(each) in ("sh", ""):
            texts = lines_of(each)
        else:
            continue
        found.update({text: named(each) for text in texts if re.match(PROGRAMS, text)})
    return found


def test_the_readme_is_short() -> None:
    """What has no room here has a page."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 128


def test_every_block_names_its_language() -> None:
    assert [named(each) for each in DOCUMENTED if language_of(each) not in KNOWN] == []


def test_a_command_that_is_not_run_has_a_reason() -> None:
    """``console`` blocks run (``test_pages.py``); ``sh`` is for the others, ``text`` for the examples of ``--help``."""
    loose = [each for each in DOCUMENTED if language_of(each) in ("sh", "text") and not each.path.endswith("cli.md")]
    places = {line: named(each) for each in loose for line in lines_of(each) if re.match(PROGRAMS, line)}
    reasons = {line: [each for each in NOT_RUN if re.match(rf"(\w+=\S+ )*?({each})", line)] for line in places}
    assert [(places[line], line) for line, found in reasons.items() if not found] == []
    assert set(NOT_RUN) == {each for found in reasons.values() for each in found}, "a reason for nothing"


@pytest.mark.parametrize("example", of("toml"), ids=named)
def test_settings_have_keys_that_are_there(example: Example) -> None:
    document = tomllib.loads(example.parsed)
    # Settings that name a class of the page are read where the page is run.
    if title_of(example) != "pyproject.toml" and "my_" not in example.parsed:
        read = settings_from_sections(json.loads(json.dumps(document).replace("./adapters/verifier-v000001", "DIR")))
        assert isinstance(read, RLSettings)


def test_the_settings_for_v0_are_a_part_of_what_doctor_writes() -> None:
    (shown,) = (tomllib.loads(each.parsed) for each in of("toml") if Path(each.path) == DOCS / "openhands-v0.md")
    text = starting_config(model="model", base_url="http://127.0.0.1:8100/v1", workspace="./workspace")
    written = tomllib.loads(text)
    for section, keys in shown.items():
        for key, value in keys.items():
            whole = written[section][key]
            assert (whole | value if isinstance(value, dict) else value) == whole, (section, key)


@pytest.mark.parametrize("line", lines())
def test_commands_are_commands(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match words:
        case ["openhands-rl", "--version"] | ["pip", "install", "torch", "--index-url", _]:
            pass
        case ["openhands-rl", command, *rest]:
            cli.parser_of(command).parse_args(_alone(rest))
        case ["python", "-m", "openhands.core.main", *rest]:
            if NEEDS["v0"]:
                from openhands.core.config.arg_utils import get_headless_parser

                get_headless_parser().parse_args(rest)
        case ["pip", "install", "uv"]:
            pass
        case ["pip" | "uv", *_, package] if "install" in words:
            name, _, extras = package.rstrip("]").partition("[")
            assert name == "." and set(filter(None, extras.split(","))) <= set(project["optional-dependencies"])
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["torchrun", *rest]:
            at = rest.index("openhands_rl_plugin.cli")
            assert rest[at - 1] == "-m"
            cli.parser_of(rest[at + 1]).parse_args(rest[at + 2 :])
        case ["vllm", "serve", _, *rest]:
            # The options with which tests and benchmarks start a real vLLM (``make test-vllm``).
            served = (ROOT / "evaluation/performance/serving/vllm_server.py").read_text()
            known = {"--served-model-name", "--max-model-len"}
            assert [word for word in rest if word.startswith("--") and word not in known and word not in served] == []
        case _:
            pytest.fail(f"a command that nothing checks: {line}")


def _alone(words: list[str]) -> list[str]:
    """The words of the first command: up to a pipe or a redirection. A file that parsing reads is one that exists."""
    end = next((at for at, word in enumerate(words) if word in ("|", ">", ">>", "2>", "&&", ";")), None)
    return [str(README) if word == "task.md" else word for word in words[:end]]
