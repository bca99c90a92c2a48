"""Runs a task's tests and reads the reward that they wrote, by Harbor's rules."""

from __future__ import annotations

import json
import math
import shlex
import time
from contextlib import suppress

from openhands_rl_plugin.core.errors import BadEnvironmentError, describe
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.evals.harbor.container import GIVEN, LOGS, HarborContainer
from openhands_rl_plugin.evals.harbor.shims import UNMET

_MOST_LOG_CHARACTERS = 4000
# A program of the agent's that would stand before one of the system's or of the tests is taken away.
_PREPARE = """chmod +x /tests/test.sh &&
for file in "$HOME"/.local/bin/*; do command -v "${file##*/}" > /dev/null && rm -rf "$file"; done
cd "$HOME/.local/bin" && rm -rf env && : > env"""


def judge(container: HarborContainer, reward_key: str = "reward") -> tuple[float, JsonObject]:
    """``verify``, where a missing verdict is the agent's fault if an untouched container has one: then a reward of 0,
    with the reason as ``broken``. Raises ``BadEnvironmentError`` where an untouched one has none either.
    """
    with container.judging:
        try:
            return verify(container, reward_key)
        except BadEnvironmentError as error:
            with container.untouched() as other:
                try:
                    verify(other, reward_key)
                except BadEnvironmentError:
                    raise error from None
            return 0.0, {"rewards": {}, "broken": str(error)}


def verify(container: HarborContainer, reward_key: str = "reward") -> tuple[float, JsonObject]:
    """The reward and the evidence: all rewards, the end of the tests' output, what the agent left running.

    The agent's sandbox is ended first; the tests run in a new one over its files. Raises ``BadEnvironmentError`` where
    they wrote no reward.
    """
    task = container.task
    left = container.end_agent()
    own = [f"{name}={shlex.quote(value)}" for name, value in container.resolved(task.test_variables).items()]
    exports = f"export {' '.join(own)}; " if own else ""
    with container.judged() as (shell, place):
        prepared = shell.run(_PREPARE, timeout=60, cwd="/", keep=False)
        if prepared.exit_code != 0:
            raise BadEnvironmentError(f"{task.name}: the tests cannot be put in place: {prepared.output[-200:]}")
        started = time.monotonic()
        # The agent may have removed the folder in which they begin.
        command = f"{exports}cd {shlex.quote(task.workdir)}; /tests/test.sh > /{LOGS}/test-stdout.txt 2>&1"
        done = shell.run(command, timeout=task.test_timeout, cwd="/", keep=False)
    files = Workspace(place)
    if done.timed_out:
        raise BadEnvironmentError(
            f"{task.name}: the tests took more than {task.test_timeout:g} s (timeout_sec of [verifier] in task.toml)"
        )
    said = ""
    if (unmet := _read(files, UNMET)) is not None:
        asked = ", ".join(dict.fromkeys(unmet.split("\n"))).strip(", ")
        raise BadEnvironmentError(f"{task.name}: the tests need what is not here: {asked:.200}")
    with suppress(BadEnvironmentError):
        said = _read(files, f"{LOGS}/test-stdout.txt") or ""
    rewards = read_rewards(files, task.name, said)
    evidence: JsonObject = {
        "rewards": dict(rewards),
        "exit_code": done.exit_code,
        "seconds": round(time.monotonic() - started, 3),
        "output": said[-_MOST_LOG_CHARACTERS:],
        "left_running": [*left],
    }
    return _chosen(rewards, reward_key, task.name), evidence


def read_rewards(files: Workspace, name: str, said: str = "") -> dict[str, float]:
    """What ``/logs/verifier/reward.json`` holds, else ``reward.txt`` as ``reward``. A missing reward is none.

    Raises ``BadEnvironmentError`` where there is no file, an empty one, or something else than finite numbers.
    """
    text, where = _read(files, f"{LOGS}/reward.json"), "reward.json"
    if text is None:
        text, where = _read(files, f"{LOGS}/reward.txt"), "reward.txt"
    if text is None:
        last = " ".join(said.split())[-200:]
        raise BadEnvironmentError(f"{name}: the tests wrote no /{LOGS}/reward.txt or reward.json; they said: {last}")
    try:
        found = json.loads(text) if where == "reward.json" else {"reward": float(text)}
        found = found if isinstance(found, dict) else {"reward": found}
        rewards = {str(key): float(value) for key, value in found.items() if not isinstance(value, str)}
    except (ValueError, TypeError, RecursionError) as error:
        raise BadEnvironmentError(f"{name}: {where} holds no rewards: {text!r:.80} ({describe(error)})") from error
    if len(rewards) < max(1, len(found)) or not all(math.isfinite(value) for value in rewards.values()):
        raise BadEnvironmentError(f"{name}: {where} holds {text!r:.80}, where only finite numbers are rewards")
    return rewards


def _chosen(rewards: dict[str, float], key: str, name: str) -> float:
    if key in rewards:
        return rewards[key]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise BadEnvironmentError(
        f"{name}: the tests wrote the rewards {', '.join(rewards)}, none of them {key!r}: set reward_key "
        "in [rl.environment]"
    )


def _read(files: Workspace, name: str) -> str | None:
    try:
        return files.read(name).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadEnvironmentError(f"/{name} cannot be read: {error}") from error


def solve(container: HarborContainer) -> str:
    """Run the oracle's solution, as Harbor's oracle agent does; its output. Raises ``BadEnvironmentError``."""
    task = container.task
    if task.solution is None:
        raise BadEnvironmentError(f"{task.name} has no solution/solve.sh")
    container.give("solution")
    exports = " ".join(
        f"{name}={shlex.quote(value)}" for name, value in container.resolved(task.solution_variables).items()
    )
    command = f"rm -rf /solution && cp -a {GIVEN}/solution /solution && {exports} bash /solution/solve.sh"
    done = container.shell.run(command, timeout=task.test_timeout, cwd=task.workdir, keep=False)
    if done.timed_out:
        raise BadEnvironmentError(f"{task.name}: solution/solve.sh took more than {task.test_timeout:g} s")
    return done.output
