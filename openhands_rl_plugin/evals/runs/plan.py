"""The plan of an evaluation: its suite, settings, runs and limits; and the section of its model."""

from __future__ import annotations

import fnmatch
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.config.toml import llm_keys, read_document
from openhands_rl_plugin.core.errors import ConfigError, problems
from openhands_rl_plugin.core.judgements import SuccessRule
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


def select[T](
    items: Sequence[T],
    id_of: Callable[[T], str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    limit: int | None = None,
) -> tuple[T, ...]:
    """The items with ids, or shell patterns of ids, in ``include`` (empty: all) but not in ``exclude``, at most
    ``limit``. Raises ``ConfigError`` for an id or pattern to include without a match."""
    ids = [id_of(item) for item in items]
    if unknown := [wanted for wanted in include if not fnmatch.filter(ids, wanted)]:
        raise ConfigError(f"no instance matches {unknown[0]!r}")
    included, excluded = ({name for each in some for name in fnmatch.filter(ids, each)} for some in (include, exclude))
    chosen = [item for item, each in zip(items, ids, strict=True) if each not in excluded]
    return tuple(item for item in chosen if not include or id_of(item) in included)[:limit]


KEY_VARIABLE = "OPENHANDS_RL_LLM_API_KEY"
"""The environment variable for a key from config.toml: keys are passed by variable name and never written."""

_COMPATIBLE = re.compile(r"^(openai|hosted_vllm|litellm_proxy|custom_openai)/")


class LLMSection(Frozen, extra="ignore"):
    """A section ``[llm.NAME]``: an OpenAI-compatible model, ``timeout`` in seconds. ``api_key_env`` names the variable
    that holds the key; empty for a server without keys.
    """

    model: Annotated[str, AfterValidator(lambda name: _COMPATIBLE.sub("", name)), Field(min_length=1)]
    base_url: str
    api_key_env: str = ""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_output_tokens: int = Field(default=4096, ge=1)
    timeout: float = Field(default=300.0, gt=0)
    num_retries: int = Field(default=4, ge=1)
    native_tool_calling: bool = True


def llm_section(config: Path | None, section: str, **given: object) -> LLMSection:
    """``[llm.SECTION]`` over ``[llm]`` of ``config``, and what is ``given`` over both.

    A key in the file is moved to the environment variable ``KEY_VARIABLE`` of this process. Raises ``ConfigError``.
    """
    found = llm_keys(read_document(config) if config else {}, section, **given)
    if not found.get("model"):
        raise ConfigError("no model is named: give --model NAME, or --llm NAME and a config.toml with [llm.NAME]")
    found["base_url"] = found.get("base_url") or "https://api.openai.com/v1"  # OpenHands has an empty one for it
    if key := found.get("api_key"):
        os.environ[KEY_VARIABLE] = str(key)
        found["api_key_env"] = KEY_VARIABLE
    elif os.environ.get("LLM_API_KEY"):
        found.setdefault("api_key_env", "LLM_API_KEY")
    try:
        llm = LLMSection.model_validate(found)
    except ValidationError as error:
        lines = (f"[llm.{section}] {'.'.join(at)}: {why}" for at, why in problems(error, LLMSection))
        raise ConfigError("\n".join(lines)) from error
    named_key(llm.api_key_env, "api_key_env")
    return llm


class RunSpec(Frozen):
    """One run over all tasks."""

    index: int
    temperature: float


class EvaluationPlan(Frozen):
    """One evaluation. ``settings`` have the server, the strategy, sampling, lengths, turns and episodes at a time.

    ``served``: the served name of an adapter's version; empty: the model of ``settings``. ``token_ids``: request token
    ids and logprobs, which training needs and which hosted APIs do not return; ``None``: of ``RLAgent``.
    ``temperatures``: one for each run, the last one repeated; empty for that of ``settings``. ``timeout`` bounds an
    episode and ``test_timeout`` the tests of one patch, in seconds. ``success`` resolves a task of an environment,
    ``environment``: its name and options.
    """

    suite: Suite
    agent: str
    settings: RLSettings
    out: Path
    note: str = "v1"
    served: str = ""
    native_tool_calling: bool = True
    token_ids: bool | None = None
    llm_retries: int = Field(default=4, ge=1)
    success: SuccessRule = SuccessRule()
    environment: JsonObject = Field(default_factory=dict)
    runs: int = Field(default=1, ge=1)
    temperatures: tuple[float, ...] = ()
    graders: int = Field(default=1, ge=1)
    timeout: float = Field(default=7200.0, gt=0)
    test_timeout: float = Field(default=1800.0, gt=0)
    command_timeout: int = Field(default=300, ge=1)

    @property
    def model(self) -> str:
        """The served name of the evaluated model."""
        return self.served or self.settings.serving.model

    def each_run(self) -> tuple[RunSpec, ...]:
        """The runs with their temperatures."""
        steps = self.temperatures or (self.settings.sampling.temperature,)
        return tuple(RunSpec(index=at, temperature=steps[min(at, len(steps) - 1)]) for at in range(self.runs))

    def run_name(self, run: RunSpec) -> str:
        """The run's folder below ``out``, as OpenHands' evaluation names it; also its id in the store."""
        model = re.sub(r"[^\w.@+-]", "_", self.model.rpartition("/")[2].replace("@", "-"))
        dataset = f"{self.suite.dataset.replace('/', '__')}-{self.suite.split}"
        return f"{dataset}/{self.agent}/{model}_maxiter_{self.settings.max_turns}_N_{self.note}-run_{run.index}"

    def run_directory(self, run: RunSpec) -> Path:
        """The folder of the run's files."""
        return self.out / self.run_name(run)

    def limits(self) -> Limits:
        """The bounds of one episode."""
        limits = self.settings.limits().model_copy(update={"timeout": self.timeout})
        # The default is made for short conversations.
        short = self.suite.software and limits.max_prompt_length == RLSettings().max_prompt_length
        return limits.model_copy(update={"max_prompt_length": None}) if short else limits

    def request(self, run: RunSpec, task: Task, attempt: int = 0) -> EpisodeRequest:
        """One episode. Its seed depends on the plan's seed, the run and the task only."""
        name, sampling = self.run_name(run), self.settings.sampling
        return EpisodeRequest(
            task=task,
            run_id=name,
            group_id=f"{name.rpartition('-run_')[0]}/{task.id}",
            sample=run.index,
            attempt=attempt,
            seed=zlib.crc32(f"{sampling.seed}/{run.index}/{task.id}".encode()) % 2**31,
            served_model=self.served or None,
            sampling=SamplingParams(temperature=run.temperature, top_p=sampling.top_p),
        )


def bounded(settings: RLSettings, suite: Suite, answer: int = 4096) -> RLSettings:
    """The settings with the bounds of a repository's episodes in the place of defaults, which are made for short
    conversations. ``answer``: tokens of a completion."""
    own = {"max_turns": 50, "max_response_length": answer, "max_obs_length": 7500, "max_workers": 1}
    kept = {name: value for name, value in own.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=kept) if suite.software else settings


def evaluated_settings(settings: RLSettings, suite: Suite, llm: LLMSection, base_model: str) -> RLSettings:
    """``[rl]`` with the model of a section and the bounds of the suite."""
    serving = ServingSettings(
        base_url=llm.base_url, model=base_model or llm.model, api_key_env=llm.api_key_env, request_timeout=llm.timeout
    )
    sampling = settings.sampling.model_copy(update={"temperature": llm.temperature or 0.0, "top_p": llm.top_p})
    workspace = settings.workspace.model_copy(update={"isolation": "bubblewrap"})
    changed = {"serving": serving, "workspace": workspace, "sampling": sampling, "host": host_of(settings)}
    return bounded(settings, suite, llm.max_output_tokens).model_copy(update=changed)
