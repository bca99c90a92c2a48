"""Groups and comparisons."""

from __future__ import annotations

from studio_client import Client, Opener, fill

from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.testing.storage import GONE, sample_episode


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


def test_two_versions_are_compared_over_the_same_tasks(opener: Opener, client: Client) -> None:
    def played(version: int, task: int, reward: float):
        policy = PolicyRef(base_model="m", adapter="shop", version=version)
        return sample_episode(f"{version}-{task}", task=f"t{task}", policy=policy, reward=reward)

    episodes = [played(7, at, float(at == 0)) for at in range(6)] + [played(8, at, float(at > 0)) for at in range(7)]
    fill(opener, episodes)
    browser = client(opener())
    found = browser.get("/api/compare?of=sets&a=shop@7&b=shop@8").json()
    assert (found["tasks"], found["only_b"], found["gained"], found["lost"]) == (6, 1, 5, 1)
    assert found["p"] == 0.21875 and found["test"] == "exact McNemar"
    assert found["rows"]["a_id"][0] == "7-0" and abs(found["difference"]["mean"] - 4 / 6) < 1e-9
    assert browser.get("/api/compare?a=one").status_code == 400
