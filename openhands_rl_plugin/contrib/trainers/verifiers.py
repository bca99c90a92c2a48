"""OpenHands as the harness of verifiers 0.4 and prime-rl, and our suites as its taskset: ``openhands-rl-verifiers``.

Imported by the Python that has verifiers; OpenHands is in another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, create_model, model_validator

from openhands_rl_plugin.apps.rollout.episode_program import (
    SECRET,
    check_release,
    checked_interpreter,
    facts_of,
    read_episode,
    rollout_command,
)
from openhands_rl_plugin.apps.rollout.play import tasks_of_file
from openhands_rl_plugin.config.rollout import PlaySettings
from openhands_rl_plugin.core.errors import ConfigError, RLError, unknown_name
from openhands_rl_plugin.evals.runs.outcome import EvalTask
from openhands_rl_plugin.evals.runs.suites import (
    ENDINGS,
    ENVIRONMENT,
    environment_tasks,
    find_suite,
    swe_tasks,
)

check_release("verifiers", "0.4")
import verifiers.v1 as vf  # noqa: E402  # pyright: ignore[reportMissingImports]  (pins another openai than OpenHands)

FACTS = "openhands_rl"
"""Where a trace's ``info`` has what the episode came to."""

# Of the endpoint, the task and the sampling, which verifiers sets.
_OWN = {"base_url", "model", "base_model", "api_key_env", "suite", "temperature", "max_response_length"}


class SuiteTask(NamedTuple):
    """``instruction`` is what the agent gets first; ``options`` choose the task on the command line."""

    id: str
    instruction: str
    options: tuple[str, ...]


@cache
def suite_tasks(suite: str, split: str = "", count: int = 0, wanted: tuple[str, ...] = ()) -> tuple[SuiteTask, ...]:
    """The tasks of a suite, or of a file of rows; ``wanted``: those with these ids only, in this order.

    ``split``: the suite's own by default, all of a file. ``count``: how many tasks ``environment`` has, which nothing
    else says. Raises ``ConfigError``.
    """
    found: list[SuiteTask] = []
    if suite.endswith(ENDINGS):
        path = Path(suite).absolute()
        entries = [entry for entry in tasks_of_file(path) if split in ("", entry.task.split)]
        found = [_chosen(entry, "--task", str(path), "--id", entry.task.id) for entry in entries]
    elif (known := find_suite(suite, split or None)).software:
        found = [_chosen(entry, "--task", entry.task.id, "--suite", suite) for entry in swe_tasks(known)]
    elif suite == ENVIRONMENT and count < 1:
        raise ConfigError("how many tasks has the environment? give --env.taskset.count N, or a file of tasks as suite")
    else:
        prefix = "" if suite == ENVIRONMENT else f"{suite}-"
        for entry in environment_tasks(known, prefix[:-1], count):
            number = entry.row["idx"]
            text = entry.task.instruction or f"task {number}"
            found.append(SuiteTask(f"{suite}-{number}", text, ("--task", f"{prefix}{number}")))
    by_id = {each.id: each for each in found}
    if len(by_id) < len(found):
        raise ConfigError(f"{suite}: several tasks have the same id")
    if not found:
        raise ConfigError(f"{suite} has no task{f' of the split {split!r}' if split else ''}")
    for name in wanted:
        if name not in by_id:
            raise ConfigError(unknown_name("task", name, by_id)[:400])
    return tuple(by_id[name] for name in wanted) if wanted else tuple(found)


def _chosen(entry: EvalTask, *options: str) -> SuiteTask:
    return SuiteTask(entry.task.id, entry.task.instruction or entry.task.id, options)


def _episode_fields() -> dict[str, Any]:
    return {name: (each.annotation, each) for name, each in PlaySettings.model_fields.items() if name not in _OWN}


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
    tasks: list[str] = Field(default_factory=list)
    """Only the tasks with these ids."""
    count: int = 0
    """How many tasks the suite `environment` has."""

    @model_validator(mode="after")
    def _check(self) -> OpenHandsTasksetConfig:
        self.listed()
        return self

    def listed(self) -> tuple[SuiteTask, ...]:
        """The tasks. Raises ``ValueError``, which is shown in one line, for a suite, split or id that is not there."""
        try:
            return suite_tasks(self.suite, self.split, self.count, tuple(self.tasks))
        except RLError as error:
            raise ValueError(str(error)) from error


class OpenHandsTaskData(vf.TaskData):
    """``options`` choose the task on the command line of ``cli.rollout``."""

    options: tuple[str, ...]


class OpenHandsTask(vf.Task[OpenHandsTaskData, vf.State, vf.TaskConfig]):
    """A task whose episode is graded by the program that plays it, in its own workspace."""

    @property
    def key(self) -> str:
        """The same for every release of verifiers and every order of the tasks."""
        return " ".join(self.data.options)

    @vf.reward
    async def episode(self, trace: vf.Trace) -> float:
        """What the program's grading says. Raises where there was none: the trace has an error then, and no reward."""
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
        """In the suite's order."""
        for each in self.config.listed():
            data = OpenHandsTaskData(id=each.id, name=each.id, prompt=each.instruction, options=each.options)
            yield OpenHandsTask(data, self.config.task)


class OpenHandsHarness(vf.Harness[OpenHandsHarnessConfig]):
    """Plays a task of ``OpenHandsTaskset`` by ``cli.rollout``, whose model calls all go to the endpoint given.

    No container is needed: the agent's commands run in the sandbox of the workspace (bubblewrap).
    """

    NEEDS_CONTAINER = False

    async def setup(self, runtime: vf.Runtime) -> None:
        """Raise ``ConfigError`` where the Python has no OpenHands, or another version of this package."""
        await asyncio.to_thread(checked_interpreter, self.config.python)

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
            raise ValueError("this harness plays tasks of --env.taskset.id openhands-rl-verifiers")
        options = self.config.episode.model_dump(exclude_defaults=True)
        python = checked_interpreter(self.config.python)
        command = rollout_command(python, data.options, endpoint, ctx.model, options, self.config.store)
        result = await runtime.run_program(command, {**self.config.resolved_env, SECRET: secret})
        rollout = read_episode(result.exit_code, result.stdout, result.stderr)
        if isinstance(rollout, str):
            return vf.ProgramResult(result.exit_code or 1, "", rollout)
        if rollout.off_policy and isinstance(ctx.client, vf.TrainClientConfig):
            return vf.ProgramResult(1, "", f"configuration: this episode is not to be trained on: {rollout.off_policy}")
        trace.info[FACTS] = facts_of(rollout)
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
