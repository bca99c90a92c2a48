"""OpenHands' V1 SDK, as it is published, behind the gateway: only its ``base_url`` is set.

The SDK of this environment, or of the Python that ``OPENHANDS_RL_SDK_PYTHON`` names; ``.ci/sdk-matrix`` has several.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gateway_world import world
from scripted_model import call, prompt_ids, says, serve

pytestmark = pytest.mark.contract

SCRIPT = Path(__file__).with_name("sdk_conversation.py")
PYTHON = os.environ.get("OPENHANDS_RL_SDK_PYTHON", sys.executable)
NOTE = "the note"
SAYS_ITS_ID = (1, 18, 1)
"""The first release that sends the conversation's id: in ``prompt_cache_key``, since 1.30 in a header, too."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.executable == PYTHON and not find_spec("openhands"), reason="needs openhands-sdk")
async def test_a_conversation_of_the_sdk_is_recorded(tmp_path: Path) -> None:
    home, workspace = tmp_path / "home", tmp_path / "workspace"
    home.mkdir()
    workspace.mkdir()
    # A list as text, which the SDK repairs.
    view = {"command": "view", "path": str(workspace / "note.txt"), "view_range": "[1, 1]"}
    answers = [
        says("I write.", call("terminal", {"command": f"echo '{NOTE}' > note.txt"}, "call-1")),
        says("I look.", call("file_editor", view, "call-2")),
        says("Done.", call("finish", {"message": "The note is written."}, "call-3")),
    ]
    with serve() as server:
        server.script("policy", answers)
        async with world(tmp_path / "store", upstream=server.url, restore_calls=True) as gateway:
            command = [PYTHON, str(SCRIPT), f"{gateway.url}/v1", str(workspace)]
            environ = {**os.environ, "OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            environ |= {"HOME": str(home), "OH_PERSISTENCE_DIR": str(home / "openhands")}
            run = partial(subprocess.run, command, env=environ, capture_output=True, text=True)
            done = await asyncio.to_thread(run)
            assert done.returncode == 0, done.stderr[-2000:]
        requests = server.requests["policy"]
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["status"] == "finished" and (workspace / "note.txt").read_text().strip() == NOTE
    assert all(request["return_token_ids"] is True and request["logprobs"] is True for request in requests)

    trajectory = await gateway.only()
    # The conversation of the SDK is the session, and all of its calls are one path.
    if tuple(map(int, report["sdk"].split("."))) >= SAYS_ITS_ID:
        assert trajectory.task.id.replace("-", "") == report["id"].replace("-", "")
    else:
        assert trajectory.task.id.startswith("opening-")
    sampled = list(trajectory.sampled())
    assert len(sampled) == sum(node.sampled for node in trajectory.nodes) == 3
    names = [node.message.tool_calls[0].name for node in sampled]
    assert names == ["terminal", "file_editor", "finish"] and all(name in str(trajectory.tools) for name in names)
    results = [message.content or "" for message in trajectory.messages() if message.role == "tool"]
    assert len(results) == 2 and NOTE in results[1]

    # Every prompt begins with all that came before, as it was sampled.
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True, True]
    ids: list[int] = []
    for node, request in zip(sampled, requests, strict=True):
        assert node.tokens is not None and len(node.tokens.logprobs) == len(node.tokens.sampled_ids)
        ids += node.tokens.prompt_ids
        assert ids == prompt_ids(request["messages"])
        ids += node.tokens.sampled_ids
