"""The list, one episode, and a group."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from studio_client import Client, Opener, fill
from tokenizers import Tokenizer, models
from train_store import store_of

from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.types import Message, Node, PolicyRef
from openhands_rl_plugin.testing import GONE, sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, FileTrajectoryStorage


def test_the_list_has_the_newest_first(opener: Opener, client: Client) -> None:
    fill(opener, [sample_episode(f"episode {at}", reward=at / 8) for at in range(5)])
    browser = client(opener())
    page = browser.get("/api/episodes?limit=2").json()
    assert page["total"] == 5
    assert page["rows"]["id"] == ["episode 4", "episode 3"]
    assert page["rows"]["return"] == [0.5, 0.375] and "reward" not in page["rows"]
    assert page["rows"]["adapter"] == ["shop", "shop"] and page["rows"]["tokens"] == [8, 8]
    assert browser.get("/api/episodes?limit=0").status_code == 400
    following = browser.get("/api/episodes?limit=2&offset=2").json()
    assert following["rows"]["id"] == ["episode 2", "episode 1"]
    bounds = {"min_reward": "0.1", "max_reward": "0.3", "run": "run", "sort": "reward"}
    found = browser.get("/api/episodes", params=bounds).json()
    assert (found["total"], found["rows"]["id"]) == (2, ["episode 1", "episode 2"])
    assert browser.get("/api/episodes?sort=-turns").status_code == 200
    assert browser.get("/api/episodes?contains=sode+3").json()["rows"]["id"] == ["episode 3"]
    for wrong in ("min_reward=x", "stop=never", "sort=turn"):
        assert browser.get(f"/api/episodes?{wrong}").status_code == 400


def test_facets_count_values_that_filters_find(opener: Opener, client: Client) -> None:
    fill(opener, [sample_episode(f"episode {at}", run=f"run {at % 2}", reward=at / 4) for at in range(5)])
    browser = client(opener())
    found = browser.get("/api/facets").json()
    assert found["facets"]["run"] == [{"value": "run 0", "count": 3}, {"value": "run 1", "count": 2}]
    assert found["facets"]["adapter"] == [{"value": "shop", "count": 5}]
    assert found["facets"]["version"] == [{"value": "7", "count": 5}] and found["facets"]["failure"] == []
    assert sum(found["rewards"]["counts"]) == 5 and found["rewards"]["high"] == 1.0
    for name, values in found["facets"].items():
        for each in values:
            assert browser.get("/api/episodes", params={name: each["value"]}).json()["total"] == each["count"]
    assert browser.get("/api/facets?run=run+1").json()["facets"]["run"] == [{"value": "run 1", "count": 2}]


def test_an_episode_comes_as_a_skeleton_and_its_bodies_by_the_page(opener: Opener, client: Client) -> None:
    sample = sample_episode("one")
    long = "\N{HOT BEVERAGE}" * 300_000
    many = tuple(Node(parent=5 + at, message=Message(role="user", content=f"{at}")) for at in range(100))
    nodes = (*sample.nodes, *many, Node(parent=105, message=Message(role="user", content=long)))
    fill(opener, [sample.model_copy(update={"nodes": nodes, "head": 106})])
    browser = client(opener())
    header = browser.get("/api/episodes/one").json()
    assert header["task"]["instruction"] == "Walk." and header["policy"]["version"] == 7
    assert header["nodes"]["parent"][:6] == [None, 0, 0, 1, 3, 4]
    assert header["nodes"]["calls"][:3] == [None, ["search"], ["search"]]
    assert header["nodes"]["sampled_tokens"][1] == 2 and header["nodes"]["visits"][2] == 3
    assert len(header["nodes"]["text"][106]) == 160
    first = browser.get("/api/episodes/one/nodes").json()
    assert (len(first["nodes"]["node"]), first["next"], first["total"]) == (64, 64, 107)
    last = browser.get("/api/episodes/one/nodes?from=100").json()
    assert (last["nodes"]["node"], last["next"]) == ([100, 101, 102, 103, 104, 105], 106)
    part = browser.get("/api/episodes/one/nodes?from=106").json()["nodes"]
    assert part["rest"] == [256 * 1024]
    rest = browser.get(f"/api/episodes/one/nodes?from=106&skip={part['rest'][0]}").json()["nodes"]
    assert part["content"][0] + rest["content"][0] == long and "rest" not in rest
    assert browser.get("/api/episodes/other").status_code == 404


def test_tokens_come_as_columns_of_ids_and_logprobs(opener: Opener, client: Client) -> None:
    sample = sample_episode("one")
    fill(opener, [sample])
    browser = client(opener())
    found = browser.get("/api/episodes/one/nodes/1/tokens").json()
    assert (found["total"], found["prompt"], found["extends"]) == (5, 3, False)
    assert found["tokens"]["id"] == [1, 2, 70_000, 3, 4]
    assert found["tokens"]["logprob"] == pytest.approx([None, None, None, -0.1, 0.0])
    assert "text" not in found["tokens"] and "the tokenizer of base is not on this machine" in found["tokenizer"]
    assert browser.get("/api/episodes/one/nodes/0/tokens").json()["total"] == 0
    assert browser.get("/api/episodes/one/nodes/6/tokens").status_code == 404


def test_tokens_are_words_where_the_recorded_model_is_here(client: Client, tmp_path: Path) -> None:
    """By its folder, and by the folder that a version of an adapter was trained in."""
    (model := tmp_path / "model").mkdir()
    Tokenizer(models.WordLevel({"a": 1, "b": 2}, "a")).save(str(model / "tokenizer.json"))
    version = tmp_path / "adapters/policy-v000001"
    version.mkdir(parents=True)
    (version / "manifest.json").write_text('{"base_model": "served"}')
    (version / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    names = {"folder": str(model), "adapter": "served", "none": "org/../../tiny"}
    policies = {name: PolicyRef(base_model=each) for name, each in names.items()}
    fill(lambda: FileTrajectoryStorage(tmp_path / "s"), [sample_episode(n, policy=p) for n, p in policies.items()])
    store = FileTrajectoryStorage(tmp_path / "s")
    browser = client(sources=StudioSources({"s": store}, adapters={"run": tmp_path / "adapters"}))
    for name in names:
        found = browser.get(f"/api/episodes/{name}/nodes/1/tokens").json()
        assert (found["tokenizer"] is None, "text" in found["tokens"]) == (name != "none", name != "none"), name


def test_a_group_is_one_tree_that_branches_at_the_first_difference(opener: Opener, client: Client) -> None:
    samples = [sample_episode(f"s{at}", group="g/1", reward=at / 2) for at in range(3)]
    nodes = [*samples[2].nodes]
    nodes[3] = nodes[3].model_copy(update={"message": nodes[3].message.model_copy(update={"content": "otherwise"})})
    samples[2] = samples[2].model_copy(update={"nodes": tuple(nodes)})
    failed = sample_episode("failed", group="g/1", failure=GONE)
    fill(opener, [*samples, failed])
    found = client(opener()).get("/api/groups/g/1").json()
    assert found["samples"]["reward"] == [0.0, 0.5, 1.0, None] and found["signal"] is True
    assert found["samples"]["advantage"][1] == 0.0 and found["samples"]["advantage"][2] > 0.9
    turns = found["turns"]
    assert turns["samples"][0] == [0, 1, 2, 3] == turns["samples"][1]
    children = [at for at, parent in enumerate(turns["parent"]) if parent == 1]
    assert sorted(map(tuple, (turns["samples"][at] for at in children))) == [(0, 1, 3), (2,)]
    assert turns["nodes"][children[0]] == [3, 3, 3]


def test_one_damaged_episode_leaves_the_others_as_they_are(client: Client, tmp_path: Path) -> None:
    store_of(tmp_path, *map(sample_episode, ("before", "broken", "after")))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute(
            "UPDATE chunks SET nodes = x'00ff00ff' WHERE episode = (SELECT row FROM episodes WHERE id = 'broken')"
        )
    browser = client(FileTrajectoryStorage(tmp_path))
    assert browser.get("/api/episodes").json()["rows"]["id"] == ["after", "broken", "before"]
    answer = browser.get("/api/episodes/broken")
    assert answer.status_code == 503 and "damaged" in answer.json()["error"]["message"]
    assert browser.get("/api/export?ids=before,after").status_code == 200
