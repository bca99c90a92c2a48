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
from openhands_rl_plugin.contrib.studio.command import sources_at
from openhands_rl_plugin.contrib.studio.server import running_studio
from openhands_rl_plugin.core.records import EpisodeStart, Label, LabelKind
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.testing.storage import sample_episode, sample_score
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
    usage = sample_episode("one").usage
    assert first["spent"] == {
        "episodes": 4,
        "prompt": 4 * usage.prompt_tokens,
        "completion": 4 * usage.completion_tokens,
    }
    assert first["probed"] == {}
    store = AdapterStore(run / "adapters")
    store.note_served(store.get("shop-v000001"), {"http://a": 0.25})
    store.note_served(store.get("shop-v000001"), {"http://b": 0.125})
    (folder,) = client(sources=sources_at([str(run)])).get("/api/adapters").json()["folders"]
    assert folder["adapters"][0]["probed"] == {"http://a": 0.25, "http://b": 0.125}


def test_an_evaluation_has_its_instances(run: Path, client: Client) -> None:
    browser = client(sources=sources_at([str(run)]))
    (one,) = browser.get("/api/evaluations").json()["evaluations"]
    assert one["figures"]["kinds"]["resolved"] == 1 and one["figures"]["pass_at_1"]["mean"] == 1.0
    found = browser.get(f"/api/evaluations/{one['name']}").json()["instances"]
    assert (found["instance"], found["kind"], found["episode"]) == (["a"], ["resolved"], ["e1"])
    shown = browser.get(f"/api/evaluations/{one['name']}?instance=a").json()
    assert shown["patch"] == "+x" and "resolved" in shown["log"]


def test_an_empty_folder_is_waited_for_and_shown_when_a_loop_has_begun(tmp_path: Path) -> None:
    sources = sources_at([str(tmp_path)])
    assert sources.waiting() == [tmp_path.name]

    async def play() -> None:
        async with FileTrajectoryStorage(tmp_path / "trajectories") as storage:
            await storage.add(sample_episode("first"))

    with running_studio(StudioConfig(port=0), sources) as studio, httpx.Client(base_url=studio.url) as http:
        http.get(studio.link, follow_redirects=True)
        missing = http.get("/api/episodes")
        assert missing.status_code == 404 and "as soon as it is" in missing.json()["error"]["message"]
        assert http.get("/api/about").json()["waiting"] == [tmp_path.name]
        with http.stream("GET", "/api/events", timeout=60) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line == "event: open")
            LoopState().save(tmp_path / "state.json")
            asyncio.run(play())
            while http.get("/api/about").json()["stores"] != [f"{tmp_path.name}/trajectories"]:
                next(line for line in lines if line == "event: reset")
            assert http.get("/api/episodes").json()["rows"]["id"] == ["first"]
        about = http.get("/api/about").json()
        assert about["waiting"] == [] and about["runs"] == [tmp_path.name]


def test_what_happens_is_told_within_a_second_and_a_stream_that_comes_back_says_so(run: Path) -> None:
    store = FileTrajectoryStorage(run / "trajectories")
    with (
        running_studio(StudioConfig(port=0), sources_at([str(run)])) as studio,
        httpx.Client(base_url=studio.url, headers={"Origin": studio.url}) as browser,
    ):
        browser.get(studio.link)
        with browser.stream("GET", "/api/events") as response:
            events = read(response)
            assert next(events)[0] == "open"
            asyncio.run(play(store, "new"))
            started = time.monotonic()
            kind, body, last = next(events)
            assert (kind, body["ids"]) == ("changed", ["new"]) and time.monotonic() - started < 2
            second = StageRecord(name="warm-start", adapter="shop-v000001", metrics={}, started=2.0, finished=3.0)
            LoopState(records=(second,)).save(run / "state.json")
            kind, body, _ = next(events)
            assert (kind, body["name"]) == ("stage", "warm-start")
        with browser.stream("GET", "/api/events", headers={"Last-Event-ID": last}) as response:
            events = read(response)
            assert [next(events)[0] for _ in range(2)] == ["open", "reset"]
            asyncio.run(judge(store))
            assert next(events)[0] == "changed"
            ended = time.monotonic()
    assert time.monotonic() - ended < 4  # streams do not hold up the end


async def play(store: FileTrajectoryStorage, identity: str) -> None:
    await store.begin(EpisodeStart.of(sample_episode(identity)))
    await store.close()


async def judge(store: FileTrajectoryStorage) -> None:
    await store.add(sample_episode("new"))
    await store.add_scores([sample_score("new", 1.0)])
    await store.add_labels([Label(id="x", trajectory_id="new", kind=LabelKind.TAG, text="x", at=1.0)])
    await store.close()


def read(response: httpx.Response) -> Iterator[tuple[str, dict, str]]:
    kind, identity = "", ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        kind, identity = (value if name == "event" else kind), (value if name == "id" else identity)
        if name == "data":
            yield kind, json.loads(value), identity
