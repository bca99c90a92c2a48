"""What the instructions of an agent cost a small model, and what is kept of its success with the short ones.

    python -m evaluation.performance.hosts.prompts --model MODEL [--repeats 3] [--tasks 0]

For each ``[rl.workspace] prompt`` and both forms of tool calls: the tokens of the first prompt, with a task of three
words, and the seconds until a served model has read it and answers its first token, without a prefix cache. A prompt
that does not fit is refused with its length. In the environment of OpenHands V1 it measures that one.

``--tasks N``: besides, N held-out tasks of swe-local, played by a script (look, apply the task's own patch, show it,
finish) through RLAgent under both prompts, and graded. The success that a model would have is not measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from evaluation.performance.hosts.instant_model import instant_model, script
from evaluation.performance.serving.reload import server
from openhands_rl_plugin.cli import main as openhands_rl
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Task, Trajectory
from openhands_rl_plugin.evals.tasks.sources.packages import suite_file
from openhands_rl_plugin.hosts.open import open_runner
from openhands_rl_plugin.hosts.shared.options import HostOptions

SERVED = "small"
PROMPTS: tuple[PromptName, ...] = get_args(PromptName)
# ChatML with tools, as models of the Qwen2.5 and Hermes families have it; SmolLM2's own template leaves tools out.
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if loop.first and tools %}

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_REFUSED = re.compile(r"(\d+) in the messages|request has (\d+) (?:input tokens|characters)")


@dataclass(frozen=True)
class First:
    """The first prompt of an episode: its tokens, and seconds to the first token; ``None`` where it was refused."""

    tokens: int
    seconds: float | None


async def first_prompt(url: str, prompt: PromptName, *, native: bool) -> First:
    """Play one episode of one turn of one token."""
    settings = RLSettings(
        serving=ServingSettings(base_url=f"{url}/v1", model=SERVED, request_timeout=600.0),
        workspace=WorkspaceSettings(prompt=prompt),
    )
    limits = Limits(max_turns=1, max_response_length=1)
    task = Task(id="first", environment="workspace", instruction="Repair the function.", limits=limits)
    options = HostOptions(environment_mode=False, native_tool_calling=native, llm_retries=1)
    async with open_runner(settings, options) as runner:
        played = await runner.run(EpisodeRequest(task=task, run_id="first", group_id="first"))
    return _first(played)


def _first(played: Trajectory) -> First:
    answer = next((node for node in played.nodes if node.sampled and node.tokens is not None), None)
    if answer is None or answer.tokens is None:
        said = played.failure.message if played.failure is not None else str(played.evidence)
        if (refused := _REFUSED.search(said)) is None:
            raise SystemExit(f"error: no answer: {said}")
        return First(int(refused[1] or refused[2]), None)
    attempts = answer.metadata.get("attempts")
    latest = attempts[-1] if isinstance(attempts, list) else answer.metadata
    assert isinstance(latest, dict) and isinstance(latest["latency"], float)
    return First(len(answer.tokens.prompt_ids), latest["latency"])


async def measure(model: Path, repeats: int) -> dict[tuple[PromptName, bool], list[First]]:
    """Prompt and form of calls (native or not) -> the measurements. Rounds are interleaved."""
    found: dict[tuple[PromptName, bool], list[First]] = {
        (prompt, native): [] for prompt in PROMPTS for native in (True, False)
    }
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        options = ("--served-model-name", SERVED, "--cache-bytes", "0", "--chat-template", template.name)
        with server(model, *options) as url:
            await first_prompt(url, "compact", native=False)  # imports, threads and pages of the first request
            for _ in range(repeats):
                for (prompt, native), rows in found.items():
                    rows.append(await first_prompt(url, prompt, native=native))
    return found


def scripted(row: dict[str, str]) -> dict[str, str]:
    """A task whose statement tells the scripted model what to do: what an engineer with the fix would."""
    replies = [
        {"bash": "git status --short; ls"},
        {"bash": f"git apply - <<'END_OF_PATCH'\n{row['patch']}\nEND_OF_PATCH"},
        {"bash": "git diff --stat"},
        {"finish": "Repaired."},
    ]
    return {**row, "problem_statement": f"{row['problem_statement']}\n{script(replies)}"}


def solved(count: int, folder: Path) -> dict[PromptName, tuple[int, int]]:
    """Prompt -> resolved tasks, and all."""
    rows = [json.loads(line) for line in suite_file("swe_local.jsonl").read_text().splitlines()]
    chosen = [scripted(row) for row in rows if row["split"] == "heldout"][:count]
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return {prompt: _evaluated(tasks, prompt, folder / prompt) for prompt in PROMPTS}


def _evaluated(tasks: Path, prompt: PromptName, folder: Path) -> tuple[int, int]:
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(f'[rl]\nstorage = {{ path = "{folder}/store" }}\n[rl.workspace]\nprompt = "{prompt}"\n')
    with instant_model() as url:
        model = ["--model", "openai/instant", "--base-url", url, "--native-tool-calling", "--agent", "RLAgent"]
        words = ["evaluate", str(tasks), *model, "--config", str(config), "--out", str(folder), "--max-iterations", "8"]
        openhands_rl([*words, "--workers", "1", "--graders", "1"])
    # A report of each task, beside one of the run, which has other keys.
    reports = [json.loads(path.read_text()) for path in folder.rglob("report.json")]
    values = [each for report in reports for each in report.values() if isinstance(each, dict)]
    return sum(each.get("resolved") is True for each in values), len(tasks.read_text().splitlines())


def show(found: dict[tuple[PromptName, bool], list[First]], kept: dict[PromptName, tuple[int, int]]) -> None:
    """A table and one JSON line."""
    host, rows = host_of(RLSettings()), []
    console = Console()
    table = Table("prompt", "calls", "tokens", "first token, s (median)", title=f"first prompt, OpenHands {host}")
    for (prompt, native), firsts in found.items():
        times = [first.seconds for first in firsts if first.seconds is not None]
        seconds = round(statistics.median(times), 2) if times else None
        rows.append({"prompt": prompt, "native": native, "tokens": firsts[0].tokens, "first_token_s": seconds})
        table.add_row(prompt, "native" if native else "text", f"{firsts[0].tokens:,}", str(seconds or "refused"))
    if found:
        console.print(table)
    for prompt, (done, all_) in kept.items():
        console.print(f"scripted policy, prompt {prompt}: {done} of {all_} tasks of swe-local resolved")
    print(json.dumps({"host": host, "first": rows, "resolved": kept}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--repeats", type=int, default=3, help="0: the tasks alone")
    parser.add_argument("--tasks", type=int, default=0, help="held-out tasks of swe-local; 0: none")
    options = parser.parse_args(arguments)
    found = asyncio.run(measure(options.model, options.repeats)) if options.repeats else {}
    with tempfile.TemporaryDirectory(prefix="rl-prompts-") as folder:
        show(found, solved(options.tasks, Path(folder)) if options.tasks else {})


if __name__ == "__main__":
    main()
