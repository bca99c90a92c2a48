"""The slot that the SDK, its agent server and Agent Canvas have for ACP agents of others, with ours in it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from acp_play import PROGRAM
from openhands.sdk import Conversation
from scripted_model import ScriptedModel
from sdk_play import repair, stored

from openhands_rl_plugin.core.types import StopReason

GUIDE = Path(__file__).parents[3] / "docs/openhands-v1.md"

pytestmark = pytest.mark.timeout(240)


@pytest.mark.shows("RLAgent in ACPAgentSettings")
def test_the_sdk_and_so_openhands_gui_talk_to_it_in_their_slot_for_agents_of_others(
    server: ScriptedModel, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented settings of the slot, as the agent server and Agent Canvas make an agent of them."""
    settings = pytest.importorskip("openhands.sdk.settings", reason="an SDK without settings for agents of others")
    if not hasattr(settings, "ACPAgentSettings"):
        pytest.skip("an SDK without settings for agents of others")
    [text] = re.findall(r"^\{\"agent_kind\".*$", GUIDE.read_text(), re.MULTILINE)
    slot = json.loads(text)
    assert slot["acp_command"][:3] == ["openhands-rl", "acp", "--config"]
    config = tmp_path / "config.toml"
    config.write_text(
        f'[llm]\nmodel = "openai/slot"\nbase_url = "{server.url}"\n[rl]\nstorage = {{path = "{tmp_path}/store"}}\n'
    )
    slot["acp_command"][0], slot["acp_command"][3] = str(PROGRAM), str(config)
    monkeypatch.setenv("HOME", str(tmp_path))
    server.script("slot", repair(Path("/workspace")))
    agent = settings.ACPAgentSettings.model_validate(slot).create_agent()
    conversation = Conversation(agent=agent, workspace=str(workspace), visualizer=None)
    try:
        conversation.send_message("Correct calc.py.")
        conversation.run()
    finally:
        conversation.close()
    assert (workspace / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    [episode] = asyncio.run(stored(tmp_path / "store"))
    assert episode.stop is StopReason.TERMINATED and len([node for node in episode.nodes if node.sampled]) == 4
