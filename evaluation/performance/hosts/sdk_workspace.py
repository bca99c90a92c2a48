"""What a step, its recording and a fork cost in OpenHands V1, against the stock agent and the stock tools.

    .venv-v1/bin/python -m evaluation.performance.hosts.sdk_workspace [--conversations 16] [--steps 20] [--repeats 3] \
        [--limit 120] [--rates-only] [--json FILE]

* steps: so many conversations in one process, each with so many commands (``echo``), after a first one that starts
  the shell; with the stock agent and its tools, ``RLAgent`` with the stock tools, ``RLAgent`` with its own, and that
  with ``[rl.serving] base_url``, where the project's engine asks the model and not litellm. Shells start one after
  the other, in an empty home: the stock terminal types its settings before its shell is there, and where ``~/.bashrc``
  takes long (one that waits for a lock of pyenv took 60 s) its first commands take the 30 s of silence each;
* recording: processor milliseconds of this process a step, of conversations that only think, so that no tool has a
  part in it. They take turns step by step, so that they meet the same load; the median of the differences is printed;
* tool: milliseconds of one ``echo`` in the stock terminal (tmux) and in ours, in turn;
* fork: a conversation of 20 steps with a workspace of 64 MB in 3,000 files.

The model answers at once, in a process of its own, with the same answers for all; only ``RLAgent`` asks it for token
ids. Nothing is logged or shown, and no conversation is persisted; ``RLAgent`` stores every completion, flushed to the
disk. Repeats are interleaved; figures are medians, and each is printed as it comes. After ``--limit`` seconds a side is
paused, and what it did until then counts.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", OPENHANDS_SUPPRESS_BANNER="1", LOG_LEVEL="ERROR")
os.environ.update(HOME=tempfile.mkdtemp(prefix="rl-sdk-home-"))
os.environ.setdefault("OH_PERSISTENCE_DIR", os.path.join(os.environ["HOME"], "openhands"))

from openhands.sdk import LLM, Agent, Tool
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.event import ObservationEvent
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from openhands.tools.terminal.definition import TerminalAction
from pydantic import SecretStr

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.hosts.shared.sessions import runtime_of
from openhands_rl_plugin.hosts.v1 import RLAgent
from openhands_rl_plugin.hosts.v1.agent import ConversationBranch, log_of
from openhands_rl_plugin.hosts.v1.session_llm import Prompts
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace
from openhands_rl_plugin.session.session import BranchWorld, Turn

RECORDING_MS, FORK_MS = 3.0, 200.0
WARM = 5
STARTS, SILENCE = 3, 8.0
"""How often a shell is started until it answers, and the seconds of silence after which the tools give a command up."""
STOCK, STOCK_TOOLS = "stock", "recorded, stock tools"
OWN_TOOLS, OWN_ENGINE = "recorded, own tools", "own tools and engine"
KINDS = (STOCK, STOCK_TOOLS, OWN_TOOLS, OWN_ENGINE)
BOUNDS = (
    (STOCK_TOOLS, STOCK, 0.9),
    (OWN_TOOLS, STOCK, 0.9),
    (OWN_ENGINE, STOCK, 3.0),
    (OWN_TOOLS, STOCK_TOOLS, 3.0),
    (OWN_ENGINE, STOCK_TOOLS, 3.0),
)
FILES, BYTES, FILES_A_FOLDER = 3000, 64 * 1024 * 1024, 50


def make_agent(kind: str, url: str, store: Path) -> Agent:
    """One of ``KINDS``."""
    llm = LLM(
        model="openai/instant",
        base_url=url,
        api_key=SecretStr("none"),
        usage_id="agent",
        num_retries=0,
        reasoning_effort=None,
        caching_prompt=False,
    )
    quiet = {"no_change_timeout_seconds": int(SILENCE)}
    tools = [Tool(name=TerminalTool.name, params=quiet), Tool(name=FileEditorTool.name)]
    if kind == "stock":
        return Agent(llm=llm, tools=tools)  # pyrefly: ignore[missing-argument]
    isolation = "none" if kind == STOCK_TOOLS else "bubblewrap"
    rl = {"max_turns": 200, "storage": {"path": str(store)}, "workspace": {"isolation": isolation}}
    if kind == OWN_ENGINE:
        rl["serving"] = {"base_url": url, "model": "instant"}
    return RLAgent(llm=llm, tools=tools, rl=rl)  # pyrefly: ignore[missing-argument]


def converse(kind: str, url: str, folder: Path) -> LocalConversation:
    """A conversation over a folder, without messages."""
    folder.mkdir(parents=True, exist_ok=True)
    agent = make_agent(kind, url, folder.parent / "store")
    return LocalConversation(
        agent=agent, workspace=str(folder), visualizer=None, stuck_detection=False, max_iteration_per_run=500
    )


def outputs(conversation: LocalConversation) -> list[str]:
    """The texts of all observations of tools."""
    return [event.observation.text for event in conversation.state.events if isinstance(event, ObservationEvent)]


@dataclass(frozen=True)
class Rate:
    """Steps a second over all conversations; answers that were not what was echoed, of ``steps`` that were done."""

    rate: float
    lost: int
    steps: int
    cut: bool

    def __str__(self) -> str:
        cut = ", cut by the limit" if self.cut else ""
        return f"{self.rate:.1f} steps a second, {self.lost} of {self.steps} answers lost{cut}"


def begun(kind: str, url: str, folder: Path, replies: list[dict[str, str]]) -> LocalConversation:
    """A conversation whose shell has answered once."""
    for attempt in range(STARTS):
        conversation = converse(kind, url, folder / str(attempt) / "w")
        # Answers are counted over the whole conversation, and the first script in it holds.
        conversation.send_message(script([{"bash": "echo here"}, {"finish": "ready"}, *replies, {"finish": "done"}]))
        conversation.run()
        answered = [event.observation for event in conversation.state.events if isinstance(event, ObservationEvent)]
        if getattr(answered[0], "exit_code", None) == 0:
            return conversation
        conversation.close()
    raise SystemExit(f"{kind}: no shell answered within {SILENCE:g} s, {STARTS} times")


def steps_a_second(kind: str, url: str, folder: Path, conversations: int, steps: int, limit: float) -> Rate:
    """Of conversations side by side, from the second step of all on."""
    replies = [{"bash": f"echo answer-{number}"} for number in range(steps)]
    talks = [begun(kind, url, folder / str(number), replies) for number in range(conversations)]
    known = [len(outputs(conversation)) for conversation in talks]
    began = time.perf_counter()

    def play(conversation: LocalConversation) -> float:
        conversation.send_message("Go on.")
        conversation.run()
        return time.perf_counter() - began

    def pause() -> None:
        for conversation in talks:
            conversation.pause()

    timer = threading.Timer(limit, pause)
    timer.start()
    with ThreadPoolExecutor(conversations) as pool:
        seconds = max(pool.map(play, talks))
    timer.cancel()
    lost = done = 0
    for conversation, before in zip(talks, known, strict=True):
        answers = outputs(conversation)[before:][:steps]
        done += len(answers)
        lost += sum(f"answer-{at}" not in answer for at, answer in enumerate(answers))
        conversation.close()
    return Rate(done / seconds, lost, done, cut=done < conversations * steps)


def processor_ms(kinds: Sequence[str], url: str, folder: Path, steps: int) -> dict[str, list[float]]:
    """Processor milliseconds of this process for each step, of conversations that think and take turns."""
    replies = [*({"think": f"thought {number}"} for number in range(steps + WARM)), {"finish": ""}]
    talks = {kind: converse(kind, url, folder / kind.replace(" ", "-") / "w") for kind in kinds}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for conversation in talks.values():
        conversation.send_message(script(replies))
    for number in range(steps + WARM):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            began = time.process_time()
            talks[kind].agent.step(talks[kind], talks[kind]._on_event)
            spent[kind].append(1000 * (time.process_time() - began))
    for conversation in talks.values():
        conversation.close()
    # The first steps import parts of litellm, and start the sandbox.
    return {kind: times[WARM:] for kind, times in spent.items()}


def tool_ms(url: str, folder: Path, calls: int) -> dict[str, list[float]]:
    """Milliseconds of every ``echo`` by the stock terminal and by ours."""
    kinds = (STOCK, OWN_TOOLS)
    talks = {kind: converse(kind, url, folder / kind.replace(" ", "-") / "w") for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for conversation in talks.values():
        conversation.send_message(script([{"finish": ""}]))
    for number in range(calls + WARM):
        for kind, conversation in talks.items():
            executor = conversation.agent.tools_map[TerminalTool.name].executor
            assert executor is not None
            began = time.perf_counter()
            observation = executor(TerminalAction(command=f"echo answer-{number}"), conversation)
            taken[kind].append(1000 * (time.perf_counter() - began))
            assert f"answer-{number}" in observation.text
    for conversation in talks.values():
        conversation.close()
    return {kind: times[WARM:] for kind, times in taken.items()}


def fill(folder: Path) -> None:
    """Random bytes in many files."""
    for number in range(FILES):
        file = folder / f"d{number // FILES_A_FOLDER}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(BYTES // FILES))


def fork_ms(url: str, folder: Path, forks: int) -> list[float]:
    """Milliseconds of each fork, one after the other."""
    fill(folder)
    conversation = converse(KINDS[2], url, folder)
    conversation.send_message(script([*([{"bash": "ls | head -3"}] * 20), {"finish": "done"}]))
    conversation.run()
    workspace = runtime_of(str(conversation.state.id))
    assert isinstance(workspace, ConversationWorkspace)
    given: Any = (conversation.agent, log_of(conversation.state), workspace, Prompts(compact=False))
    session: Any = SimpleNamespace(turn=Turn({}, ()))

    async def measure() -> list[float]:
        times = []
        for _ in range(forks):
            os.sync()
            world = BranchWorld(ConversationBranch(*given), session)
            began = time.perf_counter()
            fork = await world.fork()
            times.append(1000 * (time.perf_counter() - began))
            await fork.close()
        return times

    times = background().wait_for(measure())
    conversation.close()
    return times


def repeated(measure: Callable[[str], float], kinds: tuple[str, ...], repeats: int) -> dict[str, list[float]]:
    """Each kind in turn, in changing order."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(repeats):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            found[kind].append(measure(kind))
    return found


def tell_recording(recording: dict[str, list[float]]) -> None:
    """Print what recording adds to a step."""
    stock = recording[STOCK]
    print(f"a step of the stock agent: {statistics.median(stock):.1f} ms of processor time")
    for kind, times in recording.items():
        if kind != STOCK:
            added = [own - other for other, own in zip(stock, times, strict=True)]
            print(f"{kind} adds {statistics.median(added):.1f} ms (bound {RECORDING_MS:g})", flush=True)


def tell_rates(rates: dict[str, list[float]], lost: dict[str, int]) -> None:
    """Print steps a second, and how the sides stand to each other."""
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    for kind in KINDS:
        every = ", ".join(f"{value:.1f}" for value in rates[kind])
        print(f"{kind}: {medians[kind]:.1f} steps a second ({every}); {lost[kind]} answers lost")
    for kind, stock, bound in BOUNDS:
        print(f"{kind} / {stock}: {medians[kind] / medians[stock]:.2f} (bound {bound:g})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one side of one repeat")
    parser.add_argument("--rates-only", action="store_true", help="steps a second, nothing else")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, SDK {version('openhands-sdk')}",
        flush=True,
    )
    recording: dict[str, list[float]] = {}
    tools: dict[str, list[float]] = {}
    forks: list[float] = []
    lost: dict[str, int] = dict.fromkeys(KINDS, 0)
    with instant_model() as url, tempfile.TemporaryDirectory(prefix="rl-sdk-") as made:
        numbers = iter(range(1000))

        def fresh() -> Path:
            return Path(made) / str(next(numbers)) / "w"

        def rate(kind: str) -> float:
            found = steps_a_second(kind, url, fresh(), options.conversations, options.steps, options.limit)
            print(f"  {kind}: {found} (load {os.getloadavg()[0]:.1f})", flush=True)
            lost[kind] += found.lost
            return found.rate

        if not options.rates_only:
            thinking = (STOCK, STOCK_TOOLS, OWN_ENGINE)
            recording = {kind: [] for kind in thinking}
            for _ in range(options.repeats):
                for kind, times in processor_ms(thinking, url, fresh(), 40).items():
                    recording[kind] += times
            tell_recording(recording)
            tools = tool_ms(url, fresh(), 20 * options.repeats)
            for kind, times in tools.items():
                print(f"terminal, {kind}: {statistics.median(times):.1f} ms", flush=True)
        rates = repeated(rate, KINDS, options.repeats)
        tell_rates(rates, lost)
        if not options.rates_only:
            forks = fork_ms(url, fresh(), 5 * options.repeats)
            print(f"fork: {statistics.median(forks):.0f} ms, at most {max(forks):.0f} (bound {FORK_MS:g})")
    if options.json:
        found = {"recording": recording, "tools": tools, "rates": rates, "forks": forks, "lost": lost}
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
