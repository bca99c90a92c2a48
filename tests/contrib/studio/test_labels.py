"""Labels: what a page may write, and what becomes of it."""

from __future__ import annotations

import asyncio
import json

import pytest
from studio_client import Client, Opener, fill

from openhands_rl_plugin.core.judgements import newest_outcome, opinions, preferences
from openhands_rl_plugin.core.records import Label, TrajectoryFilter
from openhands_rl_plugin.core.types import Score, StopReason
from openhands_rl_plugin.rewards.outcome import HumanReward
from openhands_rl_plugin.rollout.scoring import ScoreReport, rescore
from openhands_rl_plugin.testing import GONE, sample_episode

SECRET = "sk-proj-" + "Q7w" * 16


def stored(opener: Opener, identity: str) -> tuple[tuple[Score, ...], tuple[Label, ...]]:
    async def read() -> tuple[tuple[Score, ...], tuple[Label, ...]]:
        storage = opener()
        async for _, scores in storage.find(TrajectoryFilter(ids=(identity,))):
            labels = await storage.labels([identity])
            await storage.close()
            return scores, labels
        raise AssertionError(identity)

    return asyncio.run(read())


def test_a_verdict_is_no_reward_until_somebody_asks_and_is_withdrawn(opener: Opener, client: Client) -> None:
    fill(opener, [sample_episode("one", reward=0.25), sample_episode("two", reward=0.25)])
    browser = client(opener(), author="me")
    made = browser.post("/api/labels", json={"episode": "one", "kind": "verdict", "value": 1, "text": "all tests pass"})
    assert made.status_code == 201 and made.json()["label"]["author"] == "me"
    assert browser.get("/api/episodes?min_reward=1").json()["total"] == 0
    assert stored(opener, "one")[0] == ()
    scored(opener)
    scores, _ = stored(opener, "one")
    assert newest_outcome(scores) is None and opinions(scores) == {"human": 1.0}
    assert browser.get("/api/episodes?unlabelled=1").json()["rows"]["id"] == ["two"]
    rows = browser.get("/api/episodes?contains=one").json()["rows"]
    assert (rows["id"], rows["human"], rows["labels"]) == (["one"], [1.0], [["good"]]) and "reward" not in rows
    assert browser.get("/api/episodes?min_reward=1").json()["total"] == 0
    gone = browser.post("/api/labels", json={"episode": "one", "withdraws": made.json()["label"]["id"]})
    assert gone.json()["labels"] == []
    assert scored(opener).withdrawn == 1 and scored(opener).withdrawn == 0
    assert opinions(stored(opener, "one")[0]) == {}


def scored(opener: Opener) -> ScoreReport:
    async def score() -> ScoreReport:
        storage = opener()
        try:
            return await rescore(storage, HumanReward())
        finally:
            await storage.close()

    return asyncio.run(score())


def test_a_comment_is_no_reward_and_no_secret(opener: Opener, client: Client) -> None:
    fill(opener, [sample_episode("one", reward=0.5)])
    browser = client(opener())
    comment = {"episode": "one", "kind": "comment", "text": f"it prints {SECRET}", "node": 1, "tokens": [0, 2]}
    assert browser.post("/api/labels", json=comment).status_code == 201
    scores, labels = stored(opener, "one")
    assert scores == () and SECRET not in labels[0].text and labels[0].tokens == (0, 2)
    assert browser.get("/api/episodes?min_reward=0.4").json()["total"] == 1
    assert SECRET not in browser.get("/api/episodes/one").text


def test_a_preference_is_what_training_reads(opener: Opener, client: Client) -> None:
    fill(opener, [sample_episode("one"), sample_episode("two"), sample_episode("other", task="another")])
    browser = client(opener())
    preference = {"episode": "two", "kind": "preference", "value": 1, "other": "one"}
    assert browser.post("/api/labels", json=preference).status_code == 201
    assert preferences(stored(opener, "two")[1]) == {frozenset({"one", "two"}): "two"}
    assert "one task" in browser.post("/api/labels", json={**preference, "other": "other"}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"episode": "one"}, 400),
        ({"episode": "one", "kind": "verdict", "value": 1e400}, 400),
        ({"episode": "one", "kind": "preference", "value": 1, "other": "one"}, 400),
        ({"episode": "one", "kind": "comment", "text": "x", "node": 1, "tokens": [0, 99]}, 400),
        ({"episode": "one", "kind": "comment", "text": "x", "author": "somebody"}, 400),
        ({"episode": "failed", "kind": "verdict", "value": 1}, 400),
        ({"episode": "one", "withdraws": "unknown"}, 404),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(opener: Opener, client: Client, body: object, status: int) -> None:
    failed = sample_episode("failed", stop=StopReason.ERROR, failure=GONE)
    fill(opener, [sample_episode("one"), sample_episode("two"), failed])
    browser = client(opener())
    text = json.dumps(body).replace("Infinity", "1e400")
    answer = browser.post("/api/labels", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert not any(browser.get(f"/api/episodes/{name}").json()["labels"] for name in ("one", "two", "failed"))
