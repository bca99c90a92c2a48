"""OpenHands' V1 SDK, as it is published, behind the gateway: only its ``base_url`` is set.

Two releases: the one in this environment (1.15 beside V0, whatever ``.ci/sdk-matrix`` installs), and the newest, of the
Python that ``OPENHANDS_RL_SDK_PYTHON`` names, of ``.venv-v1``, or of an environment that uv makes (half a gigabyte,
kept in uv's cache).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gateway_world import world
from scripted_model import call, prompt_ids, says, serve
from uv_program import uv_program

pytestmark = pytest.mark.contract

VERSION = "1.58.0"  # the newest that can be installed; 1.58.1 and 1.58.2 need a certifi that is not published
SCRIPT = Path(__file__).with_name("sdk_conversation.py")
ROOT = Path(__file__).parents[3]
NOTE = "the note"
SAYS_ITS_ID = (1, 18, 1)
"""The first release that sends the conversation's id: in ``prompt_cache_key``, since 1.30 in a header, too."""


def newest() -> list[str] | None:
    """The command of a Python with the newest SDK; ``None`` where none can be had."""
    if named := os.environ.get("OPENHANDS_RL_SDK_PYTHON"):
        return [named]
    if (beside := ROOT / ".venv-v1" / "bin" / "python").exists():
        return [str(beside)]
    if (uv := uv_program()) is None:
        return None
    wanted = [f"--with=openhands-{part}=={VERSION}" for part in ("sdk", "tools")]
    # Not this environment's Python: what is installed here would be imported in the place of what is asked for.
    base = str(Path(sys.base_prefix, "bin", "python3"))
    return [uv, "run", "--quiet", "--isolated", "--no-project", f"--python={base}", *wanted, "python"]


async def python_with_sdk(which: str) -> list[str]:
    """The command of a Python that has the SDK; skips the test where there is none."""
    command = newest() if which == "newest" else [sys.executable] if find_spec("openhands") else None
    if command is None:
        pytest.skip(f"THE V1 SDK IS NOT TESTED ({which}): there is none; set OPENHANDS_RL_SDK_PYTHON to its Python")
    status, _, told = await run([*command, "-c", "import openhands.sdk, openhands.tools"])
    if status != 0:
        pytest.skip(f"THE V1 SDK IS NOT TESTED: {' '.join(command[:2])} cannot import it: {told[-300:]}")
    return command


async def run(command: Sequence[str], home: Path | None = None) -> tuple[int | None, str, str]:
    environ = {**os.environ, "OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if home is not None:
        environ |= {"HOME": str(home), "OH_PERSISTENCE_DIR": str(home / "openhands")}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environ)
    try:
        said, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, said.decode(), told.decode()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["own", "newest"])
async def test_a_conversation_of_the_sdk_is_recorded(tmp_path: Path, which: str):
    python = await python_with_sdk(which)
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
            status, out, err = await run([*python, str(SCRIPT), f"{gateway.url}/v1", str(workspace)], home)
            assert status == 0, err[-2000:]
        requests = server.requests["policy"]
    report: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
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
