"""The clients against published servers: OPENHANDS_RL_NEMO_GYM_PYTHON and OPENHANDS_RL_VERIFIERS_PYTHON name theirs."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_servers import named, said, serving, task, text

from openhands_rl_plugin.contrib.environments.nemo_gym import NeMoGymClient, NeMoGymOptions
from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.types import Message, ToolCall

pytestmark = [pytest.mark.contract, pytest.mark.slow]

HERE = Path(__file__).parent


def nemo_gym(url: str, **options: Any) -> NeMoGymClient:
    return NeMoGymClient(NeMoGymOptions.model_validate({"base_url": url, "timeout": 30, **options}))


@contextmanager
def nemo_server(server: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    python = named("OPENHANDS_RL_NEMO_GYM_PYTHON")
    with serving(python, "serve_nemo_gym.py", "PORT", server, path="/", cwd=HERE) as found:
        yield found


async def test_nemo_gym_s_blackjack_keeps_hands_apart():
    with nemo_server("resources_servers.blackjack.app:BlackjackEnv") as (url, process):

        async def play_hand() -> float:
            player = nemo_gym(url)
            found = await player.reset(task())
            while not found.terminated:
                hand = text(found)
                value = int(re.findall(r"= (\d+)", hand)[-1])
                assert hand.startswith("Your hand: [") and value < 22
                found = await player.step(said(f"<action>{'hit' if value < 17 else 'stand'}</action>"))
            info = (await player.evidence())["info"]
            assert isinstance(info, dict) and info["result"] in ("win", "loss", "draw", "bust")
            assert info["player"] != "[]", "a hand that the server does not know"
            await player.close()
            return found.reward

        rewards = await asyncio.gather(*(play_hand() for _ in range(24)))
        assert set(rewards) <= {-1.0, 0.0, 1.0} and len(set(rewards)) > 1
        player = nemo_gym(url)
        await player.reset(task())
        process.kill()
        process.wait()
        with pytest.raises(InfrastructureError):
            await player.step(said("<action>stand</action>"))
        await player.close()


def nemo_rows(server: str) -> list[dict[str, Any]]:
    """The example rows of a server of the wheel."""
    return [json.loads(line) for line in _examples()[f"resources_servers/{server}"].read_text().splitlines()]


def _examples() -> dict[str, Path]:
    root = next(Path(named("OPENHANDS_RL_NEMO_GYM_PYTHON")).parent.parent.glob("lib/python*/site-packages"))
    return {str(file.parent.parent.relative_to(root)): file for file in sorted(root.glob("*/*/data/example.jsonl"))}


def _synonyms(row: dict[str, Any]) -> list[tuple[str, str]]:
    asked = [("get_synonym_value", json.dumps({"synonym": each})) for each in row["expected_synonyms"]]
    return [*asked, ("extract_synonym_values", json.dumps({"synonym_values": row["expected_synonym_values"]}))]


def _ground_truth(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["name"], call["arguments"]) for call in row["ground_truth"]]


SIMPLE = "resources_servers.{0}.app:{1}ResourcesServer"
TOOLS = [
    ("example_single_tool_call", "SimpleWeather", lambda _: [("get_weather", '{"city": "Paris"}')], "It is cold.", 1.0),
    ("example_multi_step", "ExampleMultiStep", _synonyms, "done", 1.0),
    ("workplace_assistant", "Workbench", _ground_truth, "done", 1.0),
]


@pytest.mark.parametrize(("server", "name", "calls", "answer", "paid"), TOOLS)
async def test_nemo_gym_s_tools_are_called_and_verified(server: str, name: str, calls: Any, answer: str, paid: float):
    [row, *_] = nemo_rows(server)
    made = calls(row)
    with nemo_server(SIMPLE.format(server, name)) as (url, _):
        of = task(environment=f"nemo-gym/{server}", row=row)
        player = nemo_gym(url)
        await player.reset(of)
        for at, (tool, arguments) in enumerate(made):
            call = ToolCall(id=f"n{at}", name=tool, arguments=arguments)
            shown = await player.step(Message(role="assistant", tool_calls=(call,)))
            assert shown.messages and not shown.terminated
        last = await player.step(Message(role="assistant", content=answer))
        assert (last.reward, last.terminated) == (paid, True)
        await player.close()
