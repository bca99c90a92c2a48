"""OpenHands as the harness of verifiers 0.4 and prime-rl, and our suites as its taskset: ``openhands-rl-verifiers``.

Imported by the Python that has verifiers; OpenHands is in another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import create_model

from openhands_rl_plugin.apps.rollout.play import find_task
from openhands_rl_plugin.apps.rollout.rollout import roll_out
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.rollout import OF_EPISODE, PlayOptions
from openhands_rl_plugin.evals.runs.suites import ENDINGS, EvalTask, find_suite, tasks_of
from openhands_rl_plugin.evals.swe.instances import read_rows

FACTS = "openhands_rl"
"""Key of a trace's ``info`` with the result of the episode."""

# Of the endpoint, the task and the sampling, which verifiers sets.
_OWN = {"base_url", "model", "base_model", "api_key_env", "suite", "temperature", "max_response_length", *OF_EPISODE}


def suite_tasks(suite: str, split: str = "", count: int | None = None) -> list[EvalTask]:
    """The tasks of a suite, or of a file of rows.

    ``split``: the suite's own by default, all of a file. ``count``: how many tasks ``environment`` has, which nothing
    else says. Raises ``ConfigError``.
    """
    if suite.endswith(ENDINGS):
        entries = [find_task(row, "", RLSettings()).entry for row in read_rows(Path(suite))]
        return [each for each in entries if split in ("", each.task.split)]
    known = find_suite(suite, split or None)
    return [*tasks_of(known, suite, count)]


def _episode_fields() -> dict[str, Any]:
    return {name: (each.annotation, each) for name, each in PlayOptions.model_fields.items() if name not in _OWN}


_EpisodeFields: Any = create_model("_EpisodeFields", __base__=vf.BaseConfig, **_episode_fields())


class EpisodeConfig(_EpisodeFields):
    """How an episode is rolled out."""


class OpenHandsHarnessConfig(vf.HarnessConfig):
    """``--env.agent.harness.*``."""

    id: str = "openhands-rl-verifiers"
    python: str = ""
    """The Python that has OpenHands; $OPENHANDS_RL_PYTHON by default, else the one of verifiers."""
    store: Path | None = None
    """A folder in which episodes are kept as well; by default they go with the runtime."""
    episode: EpisodeConfig = EpisodeConfig()
    """How an episode is rolled out: the options of `cli.rollout`, over [rl] of the file `config`."""


class OpenHandsTasksetConfig(vf.TasksetConfig):
    """``--env.taskset.*``."""

    suite: str = "swe-local"
    """A suite of `openhands-rl evaluate`, or a file of rows."""
    split: str = ""
    """Which tasks; by default those of the suite's own split, or all of a file."""
    count: int | None = None
    """How many tasks the suite `environment` has."""


class OpenHandsTaskData(vf.TaskData):
    """``task`` and ``suite`` choose the task of a rollout."""

    task: str
    suite: str


class OpenHandsTask(vf.Task[OpenHandsTaskData, vf.State, vf.TaskConfig]):
    """A task whose episode is graded by the program that runs it, in its own workspace."""

    @property
    def key(self) -> str:
        """The same for every release of verifiers and every order of the tasks."""
        return f"{self.data.suite} {self.data.task}"

    @vf.reward
    async def episode(self, trace: vf.Trace) -> float:
        """The reward by the program's grading. Raises if there is none; the trace then has an error and no reward."""
        facts = trace.info.get(FACTS)
        if facts is None:
            raise ValueError(
                f"verifiers ended the episode ({trace.stop_condition}) before it was graded: bound it by max_turns "
                "and timeout of env.agent.harness.episode"
            )
        return facts["reward"]


class OpenHandsTaskset(vf.Taskset[OpenHandsTask, OpenHandsTasksetConfig]):
    """The tasks of a suite."""

    def load(self) -> Iterator[OpenHandsTask]:
        """Yield the tasks in the suite's order."""
        suite = self.config.suite
        for each in suite_tasks(suite, self.config.split, self.config.count):
            task, prompt = each.task.id, each.task.instruction or each.task.id
            yield OpenHandsTask(
                OpenHandsTaskData(id=task, name=task, prompt=prompt, task=task, suite=suite), self.config.task
            )


class OpenHandsHarness(vf.Harness[OpenHandsHarnessConfig]):
    """Plays a task of ``OpenHandsTaskset`` by ``cli.rollout``, whose model calls all go to the endpoint given.

    No container is needed: the agent's commands run in the sandbox of the workspace (bubblewrap).
    """

    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One episode. A failed one is an exit code with the reason, in one line; it never has a reward."""
        if not isinstance(data, OpenHandsTaskData):
            raise ValueError("this harness runs tasks of --env.taskset.id openhands-rl-verifiers")
        asked = {"base_url": endpoint, "model": ctx.model, "suite": data.suite, "token_ids": False}
        options = {**self.config.episode.model_dump(exclude_defaults=True), **asked}
        rollout = await roll_out(
            data.task, options, key=secret, store=self.config.store or "", python=self.config.python
        )
        if isinstance(rollout, str):
            return vf.ProgramResult(1, "", rollout)
        if rollout.off_policy and isinstance(ctx.client, vf.TrainClientConfig):
            return vf.ProgramResult(1, "", f"configuration: this episode is not to be trained on: {rollout.off_policy}")
        trace.info[FACTS] = rollout.model_dump(mode="json", exclude={"messages", "tools", "segments"})
        return vf.ProgramResult(0, "", "")


class OpenHandsEnvConfig(vf.EnvConfig):
    """One agent, which is OpenHands, on this machine."""

    # Copied, because validation would look for the harness in the module that is being imported.
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig()).model_copy(
        update={"harness": OpenHandsHarnessConfig()}
    )


class OpenHandsEnv(vf.Env[OpenHandsEnvConfig]):
    """verifiers' single agent with other defaults: of its own it asks for a sandbox of a service, and for ``bash``."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One episode."""
        await agents.agent.run(task)
