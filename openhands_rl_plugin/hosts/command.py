"""Records the command of any agent that talks to an OpenAI-compatible, or Anthropic's, API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from openhands_rl_plugin.config.toml import NO_KEY, OwnWork
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.session.client_sessions import GatewayConfig
from openhands_rl_plugin.session.gateway import running_gateway

_SECONDS = 10.0
"""Time for a command to end after its recording is cancelled."""
_KEYS = ("OPENAI_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY")


async def record_command(
    words: Sequence[str],
    folder: Path,
    work: OwnWork,
    storage: TrajectoryStorage,
    run_id: str,
    *,
    by_strategy: bool = False,
) -> int:
    """Run a command in ``folder``, and record its completions as one episode of the run. Returns its exit code.

    The command finds the address of a gateway in front of the model server in OPENAI_BASE_URL, OPENAI_API_BASE,
    LLM_BASE_URL and ANTHROPIC_BASE_URL. ``by_strategy``: the strategy of the settings decides each chat completion.

    A cancelled one is ended, and its episode has no end. Raises ``ConfigError`` when no server is named, or the command
    cannot be started.
    """
    serving, key = work.settings.serving, str(work.llm.get("api_key") or NO_KEY)
    if not (upstream := str(work.llm.get("base_url") or serving.base_url)):
        raise ConfigError("which model server? give --base-url URL, or a file with [llm] base_url")
    session = run_id.removeprefix("run-")
    config = GatewayConfig(upstream=upstream, port=0, api_key_env="", run_id=run_id, restore_calls=True)
    async with (
        running_gateway(config, storage, settings=work.settings) as url,
        httpx.AsyncClient(trust_env=False, timeout=None) as client,
    ):
        base = f"{url}/session/{session}"
        environ = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"), f"{base}/v1")
        environ |= {name: key if key != NO_KEY else os.environ.get(name, key) for name in _KEYS}
        if by_strategy:
            answer = await client.post(f"{url}/session", json={"session": session})
            if answer.is_error:
                raise ConfigError(answer.json()["error"]["message"])
        code = await _executed(words, folder, {**os.environ, **environ, "ANTHROPIC_BASE_URL": base})
        await client.post(f"{base}/end", json={"evidence": {"exit_code": code}})
    return code


async def _executed(words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> int:
    """The exit code of the command, as a shell gives it."""
    try:
        process = await asyncio.create_subprocess_exec(*words, cwd=folder, env=environ)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be started in {folder}: {error.strerror}") from error
    try:
        code = await process.wait()
        return code if code >= 0 else 128 - code
    finally:
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _SECONDS)
        if process.returncode is None:
            process.kill()
