"""Before and after a run of a host: what is checked of the model server and the network, and what the last line is."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hosts_table import CAPABILITIES, LACKS, TABLE, host_at_hand, read_table, table_text
from needs import needs_bubblewrap
from raw_server import raw_server, respond
from scripted_model import ScriptedModel, serve

from openhands_rl_plugin import AdapterStore
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Adapter, Failure, FailureKind, Trajectory
from openhands_rl_plugin.hosts.shared.litellm_calls import check_model, check_workspace_strategy
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.shared.sessions import run_summary
from openhands_rl_plugin.testing import example_trajectory


@pytest.fixture
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        model.script("base", [])
        model.context = 200
        yield model


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("openhands")  # OpenHands' own, which hands nothing on
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)


def used(server: ScriptedModel, tmp_path: Path, model: str = "openai/base", **serving: object) -> str | None:
    settings = RLSettings.model_validate({"serving": {"adapters_path": str(tmp_path / "adapters"), **serving}})
    return check_model(settings, {"model": model, "base_url": server.url, "api_key": "none"})


def published(tmp_path: Path) -> Adapter:
    store = AdapterStore(tmp_path / "adapters")
    adapter = store.create("policy", lambda folder: (folder / "adapter_model.safetensors").touch(), base_model="base")
    store.point(adapter)
    return adapter


def test_a_server_that_is_away_is_one_line_with_a_remedy() -> None:
    with pytest.raises(InfrastructureError, match=r"no model server answers at .*: start it, for example with"):
        check_model(RLSettings(), {"model": "openai/base", "base_url": "http://127.0.0.1:9/v1"})


NULL = '{"data": [{"id": "m", "owned_by": null}]}'
LISTS = [respond(text) for text in ('[{"id": "m"}]', NULL, "<html>")]


@pytest.mark.parametrize("answer", [*LISTS, *(respond("{}", f"{status} X") for status in (400, 403, 404, 429, 500))])
async def test_a_server_that_lists_nothing_may_still_complete(answer: bytes) -> None:
    async with raw_server(lambda path, body: answer) as server:
        await asyncio.to_thread(check_model, RLSettings(), {"model": "openai/m", "base_url": server.url})


async def test_a_key_that_is_refused_ends_the_run() -> None:
    async with raw_server(lambda path, body: respond("{}", "401 X")) as server:
        with pytest.raises(ConfigError, match="refuses the API key"):
            await asyncio.to_thread(check_model, RLSettings(), {"model": "openai/m", "base_url": server.url})


def test_a_name_that_is_neither_listed_nor_answered_is_refused(server: ScriptedModel, tmp_path: Path) -> None:
    server.policies["behind-a-proxy"] = lambda body: {"role": "assistant", "content": "."}
    used(server, tmp_path, model="openai/behind-a-proxy")
    with pytest.raises(ConfigError, match=r"does not serve bsae. It has: base"):
        used(server, tmp_path, model="openai/bsae")


@pytest.mark.parametrize(
    ("rl", "expected"),
    [
        ({"rollout_strategy": "MCTS"}, "a workspace gives none: set value"),
        ({"rollout_strategy": "MCTS", "workspace": {"isolation": "none"}}, "needs an environment that can fork"),
        ({"rollout_strategy": "MCTS", "strategy": {"value": "model"}}, ""),
        ({"rollout_strategy": "BestOfN", "workspace": {"isolation": "none"}}, ""),
        ({}, ""),
    ],
)
def test_a_search_that_can_simulate_nothing_is_refused(rl: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        check_workspace_strategy(RLSettings.model_validate(rl))


def test_the_published_adapter_is_sampled_from_when_the_server_has_it(
    server: ScriptedModel, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    at = {"base_url": server.url}
    assert used(server, tmp_path, **at) is None
    adapter = published(tmp_path)
    assert used(server, tmp_path, **at) is None
    assert f"--adapters {tmp_path}/adapters --version 1 --set serving.adapter=policy" in warnings.text
    server.adapters = {adapter.name: "another"}
    assert used(server, tmp_path, **at) is None
    server.adapters = {adapter.name: "base"}
    assert used(server, tmp_path, **at) == adapter.name
    # Without [rl.serving] it is the server of the LLM.
    server.policies["another"] = lambda body: {"role": "assistant", "content": "."}
    for model, sampled in (("openai/base", adapter.name), ("openai/another", None)):
        assert used(server, tmp_path, model=model) == sampled


def changed(trajectory: Trajectory, **changes: object) -> Trajectory:
    nodes = tuple(node.model_copy(update=changes) for node in trajectory.nodes)
    return trajectory.model_copy(update={"nodes": nodes})


def test_an_episode_that_nobody_judged_names_the_remedy() -> None:
    episode = changed(example_trajectory(), reward=None)
    line = run_summary(episode, (), RLSettings())
    assert line == (
        "recorded in ~/.openhands/rl_trajectories as 00000000: 3 completions; token ids: 2 of "
        "them (openhands-rl list ~/.openhands/rl_trajectories --by says why); reward: not scored "
        "(openhands-rl score ~/.openhands/rl_trajectories --id 00000000 --value 1); "
        "openhands-rl show ~/.openhands/rl_trajectories 00000000"
    )


def test_missing_token_ids_are_reported() -> None:
    line = run_summary(changed(example_trajectory(), tokens=None), (), RLSettings())
    assert "; token ids: no (openhands-rl list ~/.openhands/rl_trajectories --by says why); " in line


def test_a_servers_words_do_not_control_the_terminal() -> None:
    failure = Failure(kind=FailureKind.MODEL, message="x\x1b]0;title\x07\nrecorded", boundary="b")
    line = run_summary(example_trajectory().model_copy(update={"failure": failure}), (), RLSettings())
    assert line.isprintable() and "; failed, so never trained on (model: x\\x1b]0;title" in line


@needs_bubblewrap
@pytest.mark.parametrize("network", [False, True])
def test_commands_reach_the_network_of_the_host_only_where_it_is_on(network: bool, tmp_path: Path):
    settings = settings_from_sections({"rl": {"workspace": {"network": network}}}).workspace
    workspace = SandboxedWorkspace(tmp_path, settings)
    fork = workspace.fork()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for each in (workspace, fork):
            reached = each.run(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}", timeout=20).exit_code == 0
            assert reached is network
    fork.close()
    workspace.close()


def test_the_page_has_every_row_and_a_column_of_this_host() -> None:
    columns = read_table(TABLE.read_text(encoding="utf-8"))
    assert table_text(columns) == TABLE.read_text(encoding="utf-8")
    assert all(tuple(column) == CAPABILITIES for column in columns.values())
    assert {"V0 1.6.0", "V1 1.58.0"} <= set(columns)
    lacking = {(name[:2], what) for name, column in columns.items() for what, cell in column.items() if cell == "no"}
    assert lacking == set(LACKS), "every no has its reason"
    here = host_at_hand()
    assert here is None or here not in ("V0 1.6.0", "V1 1.58.0") or "yes" in columns[here].values()
