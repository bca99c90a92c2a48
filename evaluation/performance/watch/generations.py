"""Generations of a watch: users' sessions, a candidate trained on them, the gates, the next version.

    PYTHONPATH=tests/helpers .venv/bin/python -m evaluation.performance.watch.generations --out generations
    ... --out repairs --world repair     # small repairs in OpenHands' controller and sandbox, not the shop

Users ask for some goals, which the model meets about every second time, and give thumbs by what the environment says.
They never ask for others, which the model meets at first: the bystanders, a third of the held-out suite. In
the sabotaged generations all thumbs are the wrong way round, or an honest candidate is exchanged for one that leaks a
secret, in turn. A killed run goes on with the generation that is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evaluation.performance.watch.poison import label
from evaluation.performance.watch.world import (
    Killed,
    Served,
    UntilTrained,
    in_turn,
    in_use,
    journal_of,
    look,
    minutes_since,
)
from evaluation.performance.watch.worlds import WORLDS, World
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.journal import WatchStep
from openhands_rl_plugin.contrib.watch.state import Measurement, state_of
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.statistics import wilson
from openhands_rl_plugin.models.adapters.store import AdapterStore

_SESSIONS = 32
_SLOW = "num_epochs = 1\nlearning_rate = 2e-3"
"""So that what there is to learn is not learnt in one generation."""
THUMBS, LEAK = "thumbs the wrong way round", "weights that leak a secret"


def generation(number: int, before: int, folder: Path, at: Served, sabotage: str, world: World) -> dict[str, object]:
    """One generation, and what it came to; no part of it is done twice, however often it is called.

    ``before``: lines of the journal when it began. ``sabotage``: its kind, empty for none.
    """
    config = world.settings(folder, at, training=_SLOW)
    settings, tasks = load_settings(config), world.suite()
    run_id = f"generation-{number}"
    served_by = folder / f"{run_id}.txt"
    if not served_by.exists():
        write_file(served_by, in_use(settings) or "")
    version = served_by.read_text() or None
    played = asyncio.run(world.play(settings, run_id, in_turn(world.goals, _SESSIONS), served=version))
    wrong = sabotage == THUMBS
    asyncio.run(label(settings, [(each, float(world.succeeded(each) is not wrong), None) for each in played]))
    if sabotage == LEAK:
        _exchange(config, before, at, world)
    look(config, at.model, tasks)
    entries = journal_of(config)
    ends = [each for each in entries[before:] if each.step in (WatchStep.HELD, WatchStep.ADMITTED)]
    measured = state_of(entries).measured.get(in_use(settings) or "")
    good = wilson(sum(world.succeeded(each) for each in played), len(played))
    return {
        "sabotage": sabotage,
        "used": version or "the base model",
        "success": good.mean,
        "low": good.low,
        "high": good.high,
        "end": ends[-1].figures.get("gate", "admitted") if ends else "nothing to train on",
        "said": ends[-1].said if ends else entries[-1].said,
        "suite": measured.mean if measured is not None else None,
        "bystanders": _bystanders(measured, world) if measured is not None else None,
    }


def _exchange(config: Path, before: int, at: Served, world: World) -> None:
    """Let an honest candidate be trained, and put harmful weights in its place."""
    steps = {each.step for each in journal_of(config)[before:]}
    if not steps & {WatchStep.PASSED, WatchStep.HELD}:
        with suppress(Killed):
            look(config, at.model, world.suite(), UntilTrained)
    steps = {each.step for each in journal_of(config)[before:]}
    if WatchStep.TRAINED in steps and not steps & {WatchStep.PASSED, WatchStep.HELD}:
        settings = load_settings(config)
        store = AdapterStore(settings.serving.adapters_directory)
        (*_, newest) = store.versions(settings.serving.adapter)
        world.leak(settings, store, newest, at.model)


def _bystanders(measured: Measurement, world: World) -> float:
    """Its success on what users never ask for."""
    found = [success for task, success in measured.success.items() if task in world.bystanders()]
    return sum(found) / len(found)


def run(out: Path, generations: int, sabotaged: Sequence[int], world: World) -> list[dict[str, object]]:
    """What each generation came to; those in ``generations.json`` are not done again."""
    import torch

    torch.set_num_threads(1)
    file, folder = out / "generations.json", out / "watch"
    found: list[dict[str, object]] = json.loads(file.read_text()) if file.exists() else []
    with world.served(world.model(out / "model")) as at:
        for number in range(len(found) + 1, generations + 1):
            torch.manual_seed(number)
            started = time.monotonic()
            began = folder / f"generation-{number}.lines"
            if not began.exists():
                lines = len(journal_of(world.settings(folder, at)))
                write_file(began, str(lines))
            kinds = dict(zip(sabotaged, itertools.cycle((THUMBS, LEAK)), strict=False))
            said = generation(number, int(began.read_text()), folder, at, kinds.get(number, ""), world)
            found.append({**said, "minutes": round(minutes_since(started), 2)})
            write_file(file, json.dumps(found, indent=1))
            print(f"{number}: {said['used']} succeeds in {said['success']:.3f}; {said['said']}", flush=True)
    return found[:generations]


def table(found: Sequence[dict[str, object]]) -> str:
    """Markdown. Success in use is that of the version that users had; the suite's that of the one in use after."""
    lines = [
        "| generation | in use | success in use (95% interval) | sabotage | candidate | suite | bystanders |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, each in enumerate(found, 1):
        after = " | ".join("-" if each[name] is None else f"{each[name]:.3f}" for name in ("suite", "bystanders"))
        success = f"{each['success']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
        lines.append(f"| {number} | {each['used']} | {success} | {each['sabotage'] or '-'} | {each['end']} | {after} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, the watch and generations.json")
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--sabotaged", type=int, nargs="*", default=[4, 7], help="numbers of these generations")
    parser.add_argument("--world", choices=WORLDS, default="shop")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(table(run(args.out.resolve(), args.generations, args.sabotaged, WORLDS[args.world])))


if __name__ == "__main__":
    main()
