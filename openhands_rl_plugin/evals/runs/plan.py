"""The plan of an evaluation: agent, model, tasks, number of runs, limits."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.config.host import HostName
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.success import SuccessRule
from openhands_rl_plugin.core.types import EpisodeRequest, Frozen, JsonObject, Limits, SamplingParams, Task
from openhands_rl_plugin.evals.runs.llm import EvaluatedModel

_LIMIT_S = 7200.0
_BOUNDS = {
    "max_iterations": "max_turns",
    "max_prompt_length": "max_prompt_length",
    "max_obs_length": "max_obs_length",
    "workers": "max_workers",
}


class RunSpec(Frozen):
    """One of the runs over all tasks. ``temperature``: ``None`` for that of the model's settings."""

    index: int
    temperature: float | None = None


class AgentStrategy(Frozen):
    """The agent's strategy, from options and settings.

    ``temperature``: that of a search, which overrides the run's; ``None`` for other strategies.
    """

    strategy: str
    options: JsonObject = Field(default_factory=dict)
    temperature: float | None = None


class SessionAccess(Frozen):
    """What commands of an evaluation's sessions may reach: the sandbox, and ``[rl.workspace]`` of the settings."""

    isolation: str
    prompt: str = "standard"
    network: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class EvaluationPlan(Frozen):
    """One evaluation. ``timeout`` bounds an episode and ``test_timeout`` the tests of one patch, in seconds.

    ``base_model``: the served name of the base model when ``model`` is an adapter; else empty. ``temperatures``: one
    for each run, the last one repeated; empty for the model's. ``retries`` bounds the retries of an episode, and of a
    grading, after infrastructure failures. ``max_prompt_length`` and ``max_obs_length`` are in tokens; without the
    latter the model's ``max_message_chars`` bounds observations. ``success``: what resolves a task of an environment,
    ``environment``: its name and options. ``host``: of OpenHands, V0 or V1 (default: what ``[rl]`` says).
    ``command``: as it was typed, for reports.
    """

    suite: str
    dataset: str
    split: str
    agent: str
    host: HostName | None = None
    model: EvaluatedModel
    base_model: str = ""
    out: Path
    note: str = "v1"
    strategy: str = ""
    strategy_options: JsonObject = Field(default_factory=dict)
    max_iterations: int = Field(default=50, ge=1)
    max_prompt_length: int | None = Field(default=None, ge=1)
    max_obs_length: int | None = Field(default=None, ge=1)
    success: SuccessRule = SuccessRule()
    environment: JsonObject = Field(default_factory=dict)
    runs: int = Field(default=1, ge=1)
    temperatures: tuple[float, ...] = ()
    seed: int = 0
    workers: int = Field(default=1, ge=1)
    graders: int = Field(default=1, ge=1)
    timeout: float = Field(default=_LIMIT_S, gt=0)
    test_timeout: float = Field(default=1800.0, gt=0)
    command_timeout: int = Field(default=300, ge=1)
    retries: int = Field(default=2, ge=0)
    completions: bool = True
    command: str = ""

    def each_run(self) -> tuple[RunSpec, ...]:
        """The runs with their temperatures."""
        steps = self.temperatures
        return tuple(
            RunSpec(index=index, temperature=steps[min(index, len(steps) - 1)] if steps else self.model.temperature)
            for index in range(self.runs)
        )

    def run_name(self, run: RunSpec) -> str:
        """The run's folder below ``out``, as OpenHands' evaluation names it; also its id in the store."""
        model = re.sub(r"[^\w.@+-]", "_", self.model.name.rpartition("/")[2].replace("@", "-"))
        dataset = f"{self.dataset.replace('/', '__')}-{self.split}"
        return f"{dataset}/{self.agent}/{model}_maxiter_{self.max_iterations}_N_{self.note}-run_{run.index}"

    def run_directory(self, run: RunSpec) -> Path:
        """The folder of the run's files."""
        return self.out / self.run_name(run)

    def limits(self) -> Limits:
        """The bounds of one episode."""
        return Limits(
            max_turns=self.max_iterations,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.model.max_output_tokens,
            max_obs_length=self.max_obs_length or max(1, self.model.max_message_chars // 4),
            timeout=self.timeout,
        )

    def request(self, run: RunSpec, task: Task, attempt: int = 0) -> EpisodeRequest:
        """One episode. Its seed depends on the plan's seed, the run and the task only."""
        name = self.run_name(run)
        return EpisodeRequest(
            task=task,
            run_id=name,
            group_id=f"{name.rpartition('-run_')[0]}/{task.id}",
            sample=run.index,
            attempt=attempt,
            seed=zlib.crc32(f"{self.seed}/{run.index}/{task.id}".encode()) % 2**31,
            served_model=self.model.name if self.base_model else None,
            sampling=SamplingParams(temperature=run.temperature, top_p=self.model.top_p),
        )


def stated_bounds(settings: RLSettings, *, software: bool) -> JsonObject:
    """Fields of a plan, and ``max_response_length``, that ``[rl]`` bounds.

    What a file does not say is a bound of environments only: its defaults are made for short conversations.
    """
    said = settings.model_fields_set if software else set(RLSettings.model_fields)
    names = {**_BOUNDS, "max_response_length": "max_response_length"}
    return {name: getattr(settings, own) for name, own in names.items() if own in said}


def served_model(settings: RLSettings, *, native_tool_calling: bool = True, token_ids: bool = True) -> EvaluatedModel:
    """The policy of ``[rl.serving]``, sampled as ``[rl.sampling]`` says."""
    serving = settings.serving
    return EvaluatedModel(
        name=serving.model,
        base_url=serving.base_url,
        api_key_env=serving.api_key_env,
        temperature=settings.sampling.temperature,
        max_output_tokens=settings.max_response_length,
        timeout=serving.request_timeout,
        native_tool_calling=native_tool_calling,
        token_ids=token_ids,
    )
