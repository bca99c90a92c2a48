"""Runs, adapters and evaluations of a folder, and what happens while the studio is open."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from studio_client import Client

from openhands_rl_plugin.contrib.studio.access import StudioConfig
from openhands_rl_plugin.contrib.studio.server import running_studio
from openhands_rl_plugin.contrib.studio.sources import sources_at
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a loop with a store, adapters, metrics and an evaluation."""

    async def fill() -> None:
        storage = FileTrajectoryStorage(tmp_path / "trajectories")
        for at in range(4):
            policy = PolicyRef(base_model="m", adapter="shop", version=1)
            sample = sample_episode(f"e{at}", task=f"t{at}", split="heldout", policy=policy, reward=float(at > 0))
            await storage.add(sample)
        await storage.close()

    asyncio.run(fill())
    store = AdapterStore(tmp_path / "adapters")
    store.point(store.create("shop", write_weights, base_model="m"))
    (tmp_path / "adapters" / "shop-v000002").mkdir()
    first = StageRecord(
        name="evaluate-base", adapter=None, metrics={"success": float("nan")}, started=1.0, finished=2.0
    )
    LoopState(records=(first,)).save(tmp_path / "state.json")
    (tmp_path / "run_id").write_text("loop-1")
    (tmp_path / "trainer" / "warm-start").mkdir(parents=True)
    rows = [json.dumps({"step": at, "loss": 1 / (at + 1)}) for at in range(5000)]
    (tmp_path / "trainer" / "warm-start" / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 50')
    outcome = {"instance_id": "a", "kind": "resolved", "turns": 3, "trajectory_id": "e1"}
    row = {"instance_id": "a", "test_result": {"git_patch": "+x", "outcome": outcome, "report": {"resolved": True}}}
    (tmp_path / "evaluation" / "RLAgent").mkdir(parents=True)
    (tmp_path / "evaluation" / "RLAgent" / "output.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def write_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def test_a_run_has_its_stages_and_curves(run: Path, client: Client) -> None:
    browser = client(sources=sources_at([str(run)]))
    (one,) = browser.get("/api/runs").json()["runs"]
    assert (one["kind"], one["run"], one["stages"]) == ("loop", "loop-1", 1)
    whole = browser.get(f"/api/runs/{one['name']}").json()
    assert whole["records"][0]["metrics"] == {"success": None} and whole["metrics"] == [
        "trainer/warm-start/metrics.jsonl"
    ]
    curve = browser.get(f"/api/runs/{one['name']}/metrics").json()
    assert curve["total"] == 5000 and len(curve["rows"]["loss"]) <= 2000 and curve["rows"]["step"][-1] == 4999
    file = run / "trainer" / "warm-start" / "metrics.jsonl"
    with open(file, "a") as opened:
        opened.write('00, "loss": 0.5}\n')
    later = browser.get(f"/api/runs/{one['name']}/metrics", params={"after": curve["after"]}).json()
    assert later["rows"] == {"step": [5000.0], "loss": [0.5]}
    for name in ("../secret", "/etc"):
        assert browser.get(f"/api/runs/{name}").status_code == 404
    assert browser.get(f"/api/runs/{one['name']}/metrics?file=../state.json").status_code == 404


def test_adapters_have_their_lineage_and_what_they_reach(run: Path, client: Client) -> None:
    (folder,) = client(sources=sources_at([str(run)])).get("/api/adapters").json()["folders"]
    first, second = folder["adapters"]
    assert first["current"] is True and first["base_model"] == "m" and "manifest.json" in second["problem"]
    assert first["held_out"]["n"] == 4 and first["held_out"]["mean"] == 0.75
    assert first["held_out"]["low"] < 0.75 < first["held_out"]["high"]
    store = AdapterStore(run / "adapters")
    store.note_served(store.get("shop-v000001"), {"http://a": 0.25})
    (folder,) = client(sources=sources_at([str(run)])).get("/api/adapters").json()["folders"]
    assert folder["adapters"][0]["probed"] == {"http://a": 0.25}


def test_an_evaluation_has_its_instances(run: Path, client: Client) -> None:
    browser = client(sources=sources_at([str(run)]))
    (one,) = browser.get("/api/evaluations").json()["evaluations"]
    assert one["figures"]["kinds"]["resolved"] == 1 and one["figures"]["pass_at_1"]["mean"] == 1.0
    found = browser.get(f"/api/evaluations/{one['name']}").json()["instances"]
    assert (found["instance"], found["kind"], found["episode"]) == (["a"], ["resolved"], ["e1"])
    shown = browser.get(f"/api/evaluations/{one['name']}?instance=a").json()
    assert shown["patch"] == "+x" and "resolved" in shown["log"]


def test_a_folder_is_shown_as_it_grows_and_an_open_page_hears_of_it(tmp_path: Path) -> None:
    async def play(identity: str) -> None:
        async with FileTrajectoryStorage(tmp_path / "trajectories") as storage:
            await storage.add(sample_episode(identity))

    with (
        running_studio(StudioConfig(port=0), sources_at([str(tmp_path)])) as studio,
        httpx.Client(base_url=studio.url, timeout=60) as http,
    ):
        http.get(studio.link)
        missing = http.get("/api/episodes")
        assert missing.status_code == 404 and "as soon as it is" in missing.json()["error"]["message"]
        assert http.get("/api/about").json()["waiting"] == [tmp_path.name]
        with http.stream("GET", "/api/events") as stream:
            events = kinds(stream)
            assert next(events) == "open"
            LoopState().save(tmp_path / "state.json")
            asyncio.run(play("first"))
            while http.get("/api/about").json()["stores"] != [f"{tmp_path.name}/trajectories"]:
                next(each for each in events if each == "reset")
            assert http.get("/api/episodes").json()["rows"]["id"] == ["first"]
            asyncio.run(play("second"))
            next(each for each in events if each == "changed")
            stage = StageRecord(name="warm-start", adapter=None, metrics={}, started=2.0, finished=3.0)
            LoopState(records=(stage,)).save(tmp_path / "state.json")
            next(each for each in events if each == "run")
        assert http.get("/api/about").json()["runs"] == [tmp_path.name]
        with http.stream("GET", "/api/events", headers={"Last-Event-ID": "1"}) as stream:
            events = kinds(stream)
            assert [next(events), next(events)] == ["open", "reset"]
            ended = time.monotonic()
    assert time.monotonic() - ended < 4  # streams do not hold up the end


def kinds(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: "))
