"""The plan of an evaluation: agent, model, tasks, number of runs, limits; and the model's settings."""

from __future__ import annotations

import fnmatch
import os
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.config.host import HostName
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.success import SuccessRule
from openhands_rl_plugin.config.toml import read_document, table_of
from openhands_rl_plugin.core.errors import ConfigError, problems, unknown_name
from openhands_rl_plugin.core.servers import named_key
from openhands_rl_plugin.core.types import EpisodeRequest, Frozen, JsonObject, Limits, SamplingParams, Task

ENVIRONMENT = "environment"
"""The suite of an environment that the settings name."""


def folder_name(environment: str) -> str:
    """The name of an environment as a valid folder name: ``gymnasium__FrozenLake-v1``."""
    return re.sub(r"[^\w.-]+", "__", environment)


class Suite(Frozen):
    """A suite by name. ``dataset`` is its name in run folders, and on the Hugging Face hub if ``on_hub``."""

    name: str
    dataset: str
    split: str
    software: bool = True
    on_hub: bool = False

    def of_environment(self, name: str) -> Suite:
        """The suite whose results are kept apart from those of other environments; other suites as they are."""
        return self.model_copy(update={"dataset": folder_name(name)}) if self.name == ENVIRONMENT and name else self

    def environment(self, settings: RLSettings) -> str:
        """The environment of its tasks: of a suite with an environment of its own, the suite's name."""
        return settings.env_name if self.software or self.name == ENVIRONMENT else self.name


class Selection(Frozen):
    """Ids or shell patterns of ids (empty: everything), then an order shuffled by a seed, then a limit."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shuffle: int | None = None
    limit: int | None = Field(default=None, ge=1)

    def of[T](self, items: Sequence[T], id_of: Callable[[T], str]) -> tuple[T, ...]:
        """The chosen items. Raises ``ConfigError`` for an id or pattern without a match."""
        ids = [id_of(item) for item in items]
        for wanted in self.include:
            if not fnmatch.filter(ids, wanted):
                pattern = any(letter in wanted for letter in "*?[")
                raise ConfigError(
                    f"no instance matches {wanted!r}" if pattern else unknown_name("instance", wanted, ids)
                )
        included = {name for each in self.include or ("*",) for name in fnmatch.filter(ids, each)}
        excluded = {name for each in self.exclude for name in fnmatch.filter(ids, each)}
        chosen = [item for item, each in zip(items, ids, strict=True) if each in included - excluded]
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(chosen)
        return tuple(chosen[: self.limit])


KEY_VARIABLE = "OPENHANDS_RL_LLM_API_KEY"
"""The environment variable for a key from config.toml: keys are passed by variable name and never written."""

OPENAI_URL = "https://api.openai.com/v1"
_OPENAI_COMPATIBLE = ("openai/", "hosted_vllm/", "litellm_proxy/", "custom_openai/")


class EvaluatedModel(Frozen):
    """An OpenAI-compatible model. ``timeout`` is in seconds, prices are for one token, lengths of answers in tokens.

    ``api_key_env`` names the variable that holds the key; empty for a server without keys. ``token_ids``: request
    token ids and logprobs, which training needs and which hosted APIs do not return; ``None``: of
    ``RLAgent``.
    """

    name: str = Field(min_length=1)
    base_url: str = Field(min_length=1)
    api_key_env: str = ""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_output_tokens: int = Field(default=4096, ge=1)
    max_message_chars: int = Field(default=30_000, ge=1)
    timeout: float = Field(default=300.0, gt=0)
    num_retries: int = Field(default=4, ge=1)
    native_tool_calling: bool = True
    token_ids: bool | None = None
    input_cost_per_token: float | None = Field(default=None, ge=0)
    output_cost_per_token: float | None = Field(default=None, ge=0)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """The cost of the tokens; ``None`` without prices."""
        if self.input_cost_per_token is None and self.output_cost_per_token is None:
            return None
        return prompt_tokens * (self.input_cost_per_token or 0) + completion_tokens * (self.output_cost_per_token or 0)

    def as_llm_config(self) -> JsonObject:
        """As OpenHands writes it into ``metadata.json``: with a placeholder for the key."""
        return {
            "model": f"openai/{self.name}",
            "base_url": self.base_url,
            "api_key": "******" if self.api_key_env else None,
            **self.model_dump(mode="json", exclude={"name", "base_url", "api_key_env"}),
        }


def evaluated_model(
    options: Mapping[str, object], config: Path | None = None, section: str | None = None
) -> EvaluatedModel:
    """The model that ``[llm.<section>]`` over ``[llm]`` of ``config`` describes, ``options`` over both.

    ``section`` may begin with ``llm.``, as in OpenHands' own commands. A key in the file is moved to the
    environment variable ``KEY_VARIABLE`` of this process. Raises ``ConfigError``.
    """
    table = _section(config, section) if config is not None else {}
    if section and config is None:
        raise ConfigError(f"--llm {section}: give the config.toml that has [llm.{_short(section)}] with --config")
    own = {key: value for key, value in table.items() if key in EvaluatedModel.model_fields}
    given = {**own, **options}
    model = given.pop("model", None) or table.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError("no model is named: give --model NAME, or --llm NAME and a config.toml with [llm.NAME]")
    url = given.get("base_url") or table.get("base_url") or _default_url(model)
    if "api_key_env" not in options:
        given["api_key_env"] = _key_variable(table, str(url))
    given = {key: value for key, value in given.items() if value is not None}
    try:
        found = EvaluatedModel.model_validate({**given, "name": _served_name(model), "base_url": url})
    except ValidationError as error:
        where = f"[llm.{_short(section)}] " if section else ""
        lines = (f"{where}{'.'.join(at)}: {what}" for at, what in problems(error, EvaluatedModel))
        raise ConfigError("\n".join(lines)) from error
    named_key(found.api_key_env, "api_key_env")
    return found


def _section(config: Path, section: str | None) -> dict[str, object]:
    try:
        table = table_of(read_document(config), ("llm",)) or {}
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from error
    common = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if section is None:
        return common
    named = {key: value for key, value in table.items() if isinstance(value, dict)}
    if _short(section) not in named:
        raise ConfigError(f"{config}: {unknown_name('[llm] section', _short(section), named)}")
    return {**common, **named[_short(section)]}


def _short(section: str | None) -> str:
    return (section or "").removeprefix("llm.")


def _served_name(model: str) -> str:
    prefix = next((prefix for prefix in _OPENAI_COMPATIBLE if model.startswith(prefix)), "")
    return model.removeprefix(prefix)


def _default_url(model: str) -> str:
    if model.startswith("openai/") or "/" not in model:
        return OPENAI_URL
    raise ConfigError(f"the model {model!r} needs the address of an OpenAI-compatible server: give --base-url")


def _key_variable(table: Mapping[str, object], url: str) -> str:
    if isinstance(key := table.get("api_key"), str) and key:
        os.environ[KEY_VARIABLE] = key
        return KEY_VARIABLE
    if os.environ.get("LLM_API_KEY"):
        return "LLM_API_KEY"
    return "OPENAI_API_KEY" if url.startswith(OPENAI_URL) else ""


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


class EvaluationPlan(Frozen):
    """One evaluation. ``timeout`` bounds an episode and ``test_timeout`` the tests of one patch, in seconds.

    ``base_model``: the served name of the base model when ``model`` is an adapter; else empty. ``temperatures``: one
    for each run, the last one repeated; empty for the model's. ``retries`` bounds the retries of an episode, and of a
    grading, after infrastructure failures. ``max_prompt_length`` and ``max_obs_length`` are in tokens; without the
    latter the model's ``max_message_chars`` bounds observations. ``success``: what resolves a task of an environment,
    ``environment``: its name and options. ``host``: of OpenHands, V0 or V1 (default: what ``[rl]`` says).
    ``command``: as it was typed, for reports.
    """

    suite: Suite
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
        dataset = f"{self.suite.dataset.replace('/', '__')}-{self.suite.split}"
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


def stated_bounds(settings: RLSettings, suite: Suite) -> JsonObject:
    """Fields of a plan, and ``max_response_length``, that ``[rl]`` bounds.

    What a file does not say is a bound of environments only: its defaults are made for short conversations.
    """
    stated = settings.model_fields_set if suite.software else set(RLSettings.model_fields)
    names = {**_BOUNDS, "max_response_length": "max_response_length"}
    return {name: getattr(settings, own) for name, own in names.items() if own in stated}


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
