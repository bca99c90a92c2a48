"""The folder of a loop beside the seeded store: stages, curves, adapters and an evaluation."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord

NOW = 1.78e9


def seed_run(folder: Path, name: str = "night", steps: int = 240) -> Path:
    """Fill ``folder/name``; returns it."""
    run = folder / name
    drawn, records, made, parent = random.Random(11), [], [], None
    store = AdapterStore(run / "adapters")
    for at in range(4):
        served = None if parent is None else parent
        figures = {"success": 0.31 + 0.11 * at, "reward": 0.35 + 0.1 * at, "episodes": 48.0, "failed": float(at % 2)}
        records.append(_stage(f"evaluate-{at}", served, figures, at * 2))
        if at == 3:
            break
        adapter = store.create("shop", _weights, base_model="Qwen3-4B", parent=parent, metrics={"loss": 0.9 / (at + 1)})
        store.point(adapter)
        made.append(adapter.name)
        parent = adapter.name
        records.append(
            _stage(f"train-{at + 1}", adapter.name, {"reward": 0.4 + 0.1 * at, "episodes": 192.0}, at * 2 + 1)
        )
        metrics = run / "trainer" / f"train-{at + 1}" / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.write_text("".join(f"{json.dumps(_row(drawn, at, step))}\n" for step in range(steps)), encoding="utf-8")
    (run / "adapters" / "shop-v000009").mkdir()  # without a manifest
    LoopState(records=tuple(records), made=tuple(made)).save(run / "state.json")
    (run / "run_id").write_text("night", encoding="utf-8")
    _evaluation(run / "evaluation" / "RLAgent", drawn)
    return run


def _weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def _stage(name: str, adapter: str | None, figures: dict[str, float], at: int) -> StageRecord:
    started = NOW - 86_400 + at * 10_000
    return StageRecord(name=name, adapter=adapter, metrics=figures, started=started, finished=started + 8_200)


def _row(drawn: random.Random, stage: int, step: int) -> dict[str, float]:
    done = step / 240
    return {
        "step": step,
        "loss": 0.9 * math.exp(-2 * done) + drawn.gauss(0, 0.03),
        "reward": 0.3 + 0.1 * stage + 0.25 * done + drawn.gauss(0, 0.05),
        "entropy": 1.4 - 0.6 * done + drawn.gauss(0, 0.04),
        "grad_norm": abs(drawn.gauss(0.8, 0.2)),
        "clipped": max(0.0, drawn.gauss(0.04, 0.02)),
        "kl": 0.02 * done + abs(drawn.gauss(0, 0.003)),
    }


def _evaluation(folder: Path, drawn: random.Random) -> None:
    folder.mkdir(parents=True)
    kinds = ("resolved", "unresolved", "unresolved", "empty_patch", "timed_out")
    with open(folder / "output.jsonl", "w", encoding="utf-8") as file:
        for at in range(60):
            kind = kinds[0] if drawn.random() < 0.5 else drawn.choice(kinds[1:])
            name = f"shop__cart-{1200 + at}"
            outcome = {
                "instance_id": name,
                "kind": kind,
                "turns": drawn.randrange(4, 40),
                "trajectory_id": "fix-cache-v3-0",
                "seconds": 9.0 + at,
                "prompt_tokens": 900 * at,
            }
            patch = (
                ""
                if kind == "empty_patch"
                else "--- a/cart.py\n+++ b/cart.py\n@@ -3 +3 @@\n-    return 1\n+    return 2\n"
            )
            result = {"git_patch": patch, "outcome": outcome, "report": {"resolved": kind == "resolved"}}
            file.write(f"{json.dumps({'instance_id': name, 'test_result': result})}\n")
