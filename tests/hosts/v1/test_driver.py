"""Episodes of a runner in real conversations of the SDK, many in one process and in worker processes."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, call, reply
from sdk_play import TERMINAL, finish, think
from small_shop import running_shop

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.records import EpisodeGrowth, TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

IN_A_WORKSPACE = HostOptions(environment_mode=False)


def settings_for(server: ScriptedModel, model: str, **more) -> RLSettings:
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    return RLSettings(serving=serving, workspace=WorkspaceSettings(isolation="none"), **{"max_workers": 8, **more})


def request(name: str = "t", *, turns: int = 10, **limits) -> EpisodeRequest:
    task = Task(id=name, environment="workspace", instruction="Do it.", limits=Limits(max_turns=turns, **limits))
    return EpisodeRequest(task=task, run_id="r", group_id=f"r/{name}")


async def play(
    server: ScriptedModel, model: str, asked: EpisodeRequest, options: HostOptions = IN_A_WORKSPACE, **more
) -> Trajectory:
    async with open_runner(settings_for(server, model, **more), options) as runner:
        return await runner.run(asked)


@pytest.mark.shows("many sessions in one process")
async def test_sixteen_conversations_in_one_process(server: ScriptedModel) -> None:
    def policy(body: dict) -> dict:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return finish() if turn else reply(None, call(TERMINAL, {"command": f"echo {turn}"}, f"call-{turn}"))

    server.policies["many"] = policy
    async with open_runner(settings_for(server, "many", max_workers=16), IN_A_WORKSPACE) as runner:
        episodes = await asyncio.gather(*(runner.run(request(str(number))) for number in range(16)))
    assert {episode.stop for episode in episodes} == {StopReason.TERMINATED}
    assert [len(episode.acted()) for episode in episodes] == [2] * 16
    assert all(node.tokens is not None for episode in episodes for node in episode.nodes if node.sampled)


async def test_limits_of_the_task(server: ScriptedModel) -> None:
    server.policies["endless"] = lambda body: think(str(len(body["messages"])), f"call-{len(body['messages'])}")
    episode = await play(server, "endless", request(turns=3))
    assert episode.stop is StopReason.MAX_TURNS and len(episode.acted()) == 3 and episode.failure is None
    server.delay = 0.5
    try:
        episode = await play(server, "endless", request(turns=100, timeout=5.0))
    finally:
        server.delay = 0.0
    assert (episode.stop, episode.failure) == (StopReason.TIMEOUT, None) and 0 < len(episode.acted()) < 10


async def test_an_agent_that_only_talks_is_answered(server: ScriptedModel) -> None:
    server.script("talks", [reply("What shall I do?"), reply("Really?"), finish()])
    replies = ("Go on.", "Go on. Now.")
    episode = await play(server, "talks", request(), IN_A_WORKSPACE.model_copy(update={"replies": replies}))
    assert [node.message.content for node in episode.nodes if node.message.role == "user"][1:] == [
        "Go on.",
        "Go on. Now.",
    ]
    assert episode.stop is StopReason.TERMINATED and len(episode.acted()) == 3


async def test_a_storage_that_fails_stops_the_run(server: ScriptedModel, tmp_path: Path) -> None:
    class FullStorage(FileTrajectoryStorage):
        async def grow(self, growth: EpisodeGrowth) -> None:
            raise StorageError("no space left on device")

    server.policies["stored"] = lambda body: think(str(len(body["messages"])), f"call-{len(body['messages'])}")
    storage = FullStorage(tmp_path / "store")
    async with open_runner(settings_for(server, "stored"), IN_A_WORKSPACE, storage=storage) as runner:
        with pytest.raises(StorageError, match="no space"):
            await runner.run(request())


@pytest.mark.shows("the stock agent, recorded")
async def test_the_stock_agent_is_recorded_as_it_is(server: ScriptedModel) -> None:
    answers = [reply(None, call("think", '{"thought":"hm" }', "call-1")), finish()]
    server.script("stock", answers)
    episode = await play(server, "stock", request(), IN_A_WORKSPACE.model_copy(update={"agent": "Agent"}))
    assert episode.strategy.name == "Agent" and episode.stop is StopReason.TERMINATED
    replayed = server.requests["stock"][1]["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    # The SDK writes arguments anew since 1.21.
    assert (replayed == '{"thought":"hm" }') == version("openhands-sdk").startswith("1.15.")


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"agent": "CodeActAgent"}, {}, "CodeActAgent"),
        ({}, {"host": "v0"}, r"\[rl\] host: OpenHands V0 needs openhands-ai 1.6"),
        ({}, {"serving": ServingSettings()}, r"\[rl.serving\] base_url"),
    ],
)
async def test_wrong_settings_are_refused_in_one_line(
    server: ScriptedModel, changes: dict, settings: dict, message: str
) -> None:
    wanted = settings_for(server, "none").model_copy(update=settings)
    with pytest.raises(ConfigError, match=message) as refused:
        async with open_runner(wanted, IN_A_WORKSPACE.model_copy(update=changes)):
            pass
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.shows("worker processes")
async def test_worker_processes(server: ScriptedModel, tmp_path: Path) -> None:
    server.policies["pool"] = lambda body: (
        finish() if any(each["role"] == "tool" for each in body["messages"]) else think("hm", "call-1")
    )
    storage = FileTrajectoryStorage(tmp_path / "store")
    async with open_runner(settings_for(server, "pool"), IN_A_WORKSPACE, storage=storage, workers=1) as runner:
        episodes = await asyncio.gather(*(runner.run(request(str(number))) for number in range(4)))
    assert {episode.stop for episode in episodes} == {StopReason.TERMINATED}
    assert await storage.count(TrajectoryFilter()) == 4
    await storage.close()


@pytest.mark.shows("environments rolled out by a runner")
async def test_environments_are_rolled_out_without_the_sdk(server: ScriptedModel) -> None:

    server.policies["shop"] = lambda body: reply("Thought: I buy.\nAction: click[buy now]")
    with running_shop() as url:
        host, port = url.rsplit(":", 1)
        settings = settings_for(server, "shop", env_server_base=host, env_port=int(port), max_turns=3)
        async with open_runner(settings) as runner:
            task = Task(id="webshop-0", environment="webshop", data={"idx": 0})
            episode = await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g", seed=3))
    assert episode.failure is None and episode.stop in (StopReason.MAX_TURNS, StopReason.TERMINATED)
    assert all(node.tokens is not None for node in episode.nodes if node.sampled)
