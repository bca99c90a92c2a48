"""Adapters that are made worse on purpose, and the gate of a watch at which each is stopped.

    PYTHONPATH=tests/helpers .venv/bin/python -m evaluation.performance.watch.sabotage --out sabotage

A real watch, with the embedded server and shop, has a version in use that was trained on honest episodes. Then, each
time from there: rewards, labels or episodes are poisoned and a candidate is trained on them; or an honest candidate's
files are damaged; or its weights are exchanged for harmful ones with a probe of their own. ``at first``: the same while
the base model is in use, so that a candidate may succeed more often and do harm beside it. A killed run goes on with
the kinds that are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from evaluation.performance.watch.damage import DAMAGE
from evaluation.performance.watch.exchange import EXCHANGE, FIRST, Exchange
from evaluation.performance.watch.poison import POISON, flagged, leaking, malformed
from evaluation.performance.watch.world import (
    EVERY_GOAL,
    Killed,
    Served,
    UntilTrained,
    in_turn,
    in_use,
    journal_of,
    look,
    minutes_since,
    play,
    served,
    suite,
    watching,
    write_model,
    write_settings,
)
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.journal import Entry, WatchStep
from openhands_rl_plugin.contrib.watch.service import Watch
from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.store import AdapterStore

HONEST = "an honest candidate"
PASSED, NOTHING, UNDECIDED = "passed", "nothing to train on", "undecided"
_LOOKS = 4
_SESSIONS = 36


class Bench:
    """The folder of one watch, which goes back to a stage before each sabotage."""

    def __init__(self, out: Path, at: Served) -> None:
        self._out, self._at = out, at
        self.folder = out / "watch"
        self.config = write_settings(self.folder, at)
        self.tasks = suite()

    def prepare(self) -> None:
        """The stages: nothing is ``begun``; the ``first`` honest candidate is trained; it is ``used``; another honest
        one is ``trained``."""
        if not (self._out / "begun").exists():
            self._keep("begun")
        self._stage("first", "begun", 90, UntilTrained)
        self._stage("used", "first", 0)
        self._stage("trained", "used", _SESSIONS, UntilTrained)
        self.restore("used")
        assert in_use(load_settings(self.config)), journal_of(self.config)[-1].said

    def _stage(self, name: str, after: str, sessions: int, kind: type[Watch] = Watch) -> None:
        """So many sessions of users after another stage, and a look at them."""
        if (self._out / name).exists():
            return
        self.restore(after)
        settings = load_settings(self.config)
        if sessions:
            asyncio.run(play(settings, name, in_turn(EVERY_GOAL, sessions), served=in_use(settings)))
        with suppress(Killed):
            look(self.config, self._at.model, self.tasks, kind)
        self._keep(name)

    def settings(self, watch: str = "", training: str = "") -> None:
        """Write the settings anew."""
        self.config = write_settings(self.folder, self._at, watch, training)

    def restore(self, stage: str) -> int:
        """Go back, on the server, too; the lines of the journal then."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._out / stage, self.folder)
        self.settings()

        async def follow() -> None:
            settings = load_settings(self.config)
            async with watching(self.config, self._at.model, self.tasks) as (_, publisher):
                for number in (1, 2):
                    with suppress(PublishError):
                        await publisher.retire(f"{settings.serving.adapter}-v{number:06}")
                if (used := in_use(settings)) is not None:
                    await publisher.stage(AdapterStore(settings.serving.adapters_directory).get(used))

        asyncio.run(follow())
        return len(journal_of(self.config))

    def _keep(self, stage: str) -> None:
        shutil.copytree(self.folder, self._out / f"{stage}.part")
        (self._out / f"{stage}.part").rename(self._out / stage)

    def poisoned(self, kind: str) -> Sequence[Entry]:
        """What the watch noted of what was poisoned."""
        poison = POISON[kind]
        before = self.restore("begun" if poison.first else "used")
        routing = f'routing = "{self.folder / "routing.json"}"\nshare = 0.5\nshare_sessions = {_SESSIONS}'
        self.settings(routing if poison.used else poison.watch, poison.training)
        settings = load_settings(self.config)
        asyncio.run(poison.bring(settings, self._at.model))
        self._look(before)
        if poison.used and self._now(before)[-1].step is WatchStep.SHARED:
            asked = in_turn(EVERY_GOAL, _SESSIONS)
            for name, version in (("candidate", self._now(before)[-1].adapter), ("stable", in_use(settings))):
                asyncio.run(play(settings, name, asked, served=version))
            self._look(before)
        return self._now(before)

    def spoilt(self, change: Callable[[], None], stage: str = "trained") -> Sequence[Entry]:
        """What the watch noted of the honest candidate of that stage after ``change``."""
        before = self.restore(stage)
        change()
        self._look(before)
        return self._now(before)

    def damaged(self, kind: str) -> Sequence[Entry]:
        """As ``spoilt``, by damage to the files."""
        return self.spoilt(lambda: DAMAGE[kind](Path(self._candidate.path)))

    def exchanged(self, exchange: Exchange, stage: str = "trained") -> Sequence[Entry]:
        """As ``spoilt``, by other weights."""

        def change() -> None:
            settings = load_settings(self.config)
            store = AdapterStore(settings.serving.adapters_directory)
            exchange(settings, store, self._candidate, self._at.model)

        return self.spoilt(change, stage)

    @property
    def _candidate(self) -> Adapter:
        serving = load_settings(self.config).serving
        return AdapterStore(serving.adapters_directory).versions(serving.adapter)[-1]

    def _now(self, before: int) -> Sequence[Entry]:
        return journal_of(self.config)[before:]

    def _look(self, before: int) -> None:
        """Look until the round is over, or waits; what could not be done is tried again."""
        for _ in range(_LOOKS):
            look(self.config, self._at.model, self.tasks)
            entries = self._now(before)
            if not entries or entries[-1].step is not WatchStep.COULD_NOT:
                return


def verdict(entries: Sequence[Entry]) -> dict[str, object]:
    """Where it was stopped, the sentence about it, and the candidate's success in the suite, if it was played."""
    measured = [each.figures["mean"] for each in entries if each.step is WatchStep.MEASURED]
    success = measured[-1] if measured else None
    for each in entries:
        if each.step is WatchStep.HELD:
            return {"stopped": str(each.figures["gate"]), "said": each.said, "success": success}
        if each.step is WatchStep.ADMITTED:
            return {"stopped": PASSED, "said": each.said, "success": success}
    waits = [each.step for each in entries] == [WatchStep.JUDGED]
    stopped, said = (NOTHING if waits else UNDECIDED), entries[-1].said if entries else "nothing happened"
    return {"stopped": stopped, "said": said, "success": success}


def run(out: Path, only: Sequence[str]) -> dict[str, dict[str, object]]:
    """Kind -> its verdict and minutes; what is in ``results.json`` is not done again."""
    import torch

    torch.set_num_threads(1)
    file = out / "results.json"
    results: dict[str, dict[str, object]] = json.loads(file.read_text()) if file.exists() else {}
    with served(write_model(out / "model", habits=(flagged, leaking, malformed))) as at:
        bench = Bench(out, at)
        bench.prepare()
        every: dict[str, Callable[[], Sequence[Entry]]] = {
            HONEST: lambda: bench.spoilt(lambda: None),
            **{kind: lambda kind=kind: bench.poisoned(kind) for kind in POISON},
            **{kind: lambda each=each: bench.exchanged(each) for kind, each in EXCHANGE.items()},
            **{kind: lambda each=each: bench.exchanged(each, "first") for kind, each in FIRST.items()},
            **{kind: lambda kind=kind: bench.damaged(kind) for kind in DAMAGE},
        }
        for kind, sabotage in every.items():
            if kind in results or (only and kind not in only):
                continue
            torch.manual_seed(0)
            started = time.monotonic()
            found = verdict(sabotage())
            results[kind] = {**found, "minutes": round(minutes_since(started), 2)}
            write_file(file, json.dumps(results, indent=1))
            print(f"{kind}: {found['stopped']}: {found['said']}", flush=True)
    return {kind: results[kind] for kind in every if kind in results}


def table(results: dict[str, dict[str, object]]) -> str:
    """Markdown, and how many were stopped."""
    lines = ["| made worse by | stopped by | success in the suite | minutes |", "|---|---|---|---|"]
    for kind, found in results.items():
        success = "-" if found["success"] is None else f"{found['success']:.3f}"
        lines.append(f"| {kind} | {found['stopped']} | {success} | {found['minutes']} |")
    worse = [found for kind, found in results.items() if kind != HONEST]
    stopped = sum(found["stopped"] not in (PASSED, UNDECIDED) for found in worse)
    return "\n".join([*lines, "", f"{stopped} of {len(worse)} were stopped"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, the stages and results.json")
    parser.add_argument("--only", nargs="*", default=(), help="these kinds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(table(run(args.out.resolve(), args.only)))


if __name__ == "__main__":
    main()
