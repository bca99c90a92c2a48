"""Names -> classes: a built-in table, then entry points of installed packages, then ``"module:Class"``.

Plugins are known as strings only, so loading one imports no other. Another package adds one with an entry point:

    [project.entry-points."openhands_rl_plugin.strategies"]
    MyStrategy = "my_package.strategies:MyStrategy"
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model

from openhands_rl_plugin.core.errors import ConfigError, describe, problems, unknown_name

Kind = Literal[
    "strategies",
    "environments",
    "engines",
    "storages",
    "rewards",
    "values",
    "commands",
    "suites",
    "demonstrators",
    "training_engines",
    "formats",
    "sections",
    "reports",
]
"""Groups of entry points, below ``openhands_rl_plugin.``."""

BUILTINS: Mapping[Kind, Mapping[str, str]] = {
    "strategies": {
        "BestOfN": "openhands_rl_plugin.rollout.strategies.base:BestOfNStrategy",
        "MCTS": "openhands_rl_plugin.rollout.strategies.mcts:MCTSStrategy",
        "StandardReAct": "openhands_rl_plugin.rollout.strategies.base:StandardReActStrategy",
        "ToT": "openhands_rl_plugin.rollout.strategies.base:ToTStrategy",
    },
    "environments": {
        "agentgym": "openhands_rl_plugin.environments.http.client:AgentGymClient",
        "gymnasium": "openhands_rl_plugin.environments.gyms:GymnasiumEnvironment",
        "openenv": "openhands_rl_plugin.environments.openenv:OpenEnvClient",
        "tools": "openhands_rl_plugin.environments.tools.environment:ToolEnvironment",
        "web": "openhands_rl_plugin.environments.http.client:WebEnvClient",
        "webshop": "openhands_rl_plugin.environments.http.client:WebEnvClient",
    },
    "engines": {
        "openai": "openhands_rl_plugin.models.engines.client:OpenAIEngine",
        "transformers": "openhands_rl_plugin.models.engines.transformers:TransformersEngine",
    },
    "storages": {
        "file": "openhands_rl_plugin.trajectories.sqlite.storage:FileTrajectoryStorage",
        "mongodb": "openhands_rl_plugin.trajectories.mongodb.storage:MongoDBTrajectoryStorage",
    },
    "rewards": {
        "command": "openhands_rl_plugin.rewards.command:CommandReward",
        "human": "openhands_rl_plugin.rewards.outcome:HumanReward",
        "matching": "openhands_rl_plugin.rewards.matching:MatchingReward",
        "recorded": "openhands_rl_plugin.rewards.outcome:RecordedReward",
        "return": "openhands_rl_plugin.rewards.outcome:ReturnReward",
        "success": "openhands_rl_plugin.rewards.outcome:SuccessReward",
        "success-bonus": "openhands_rl_plugin.rewards.outcome:SuccessBonusReward",
        "verifier": "openhands_rl_plugin.rewards.verifier.reward:VerifierReward",
        "tests": "openhands_rl_plugin.rewards.outcome:TestsReward",
    },
    "values": {
        "model": "openhands_rl_plugin.rollout.strategies.value:ModelValue",
        "none": "openhands_rl_plugin.rollout.strategies.value:NoValue",
        "reward": "openhands_rl_plugin.rollout.strategies.value:RewardValue",
        "rollout": "openhands_rl_plugin.rollout.strategies.value:RolloutValue",
        "verifier": "openhands_rl_plugin.rollout.strategies.value:VerifierValue",
    },
}

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")


def names(kind: Kind) -> tuple[str, ...]:
    """All known names of a kind. Imports nothing."""
    return tuple(sorted({*BUILTINS.get(kind, {}), *installed(kind)}))


def registered(kind: Kind, *, besides: tuple[str, ...] = ()) -> AfterValidator:
    """A validator of a setting that names a plugin, or one of ``besides``."""

    def checked(value: str) -> str:
        try:
            if value not in besides:
                target_of(kind, value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(checked)


def load(kind: Kind, name: str) -> type[Any]:
    """The class behind ``name``. Raises ``ConfigError`` for an unknown name or one that cannot be imported.

    For an environment, the part before a slash decides, as in ``agentgym/babyai``; an environment without a class of
    its own is a server of the simple ``/reset`` and ``/step`` protocol.
    """
    found = find(kind, name)
    if not isinstance(found, type):
        raise ConfigError(f"{singular(kind)} {name!r}: {target_of(kind, name)} is not a class")
    return found


def find(kind: Kind, name: str) -> Any:
    """The object or the module that the entry point ``name`` names. Raises ``ConfigError``, as ``load`` does."""
    target = target_of(kind, name)
    module, _, attribute = target.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{singular(kind)} {name!r} cannot be loaded from {target}: {describe(error)}; install the package that "
            "has it, set PYTHONPATH to its folder, or correct the name"
        ) from error


def check_options(kind: Kind, name: str, options: Mapping[str, object] | None = None) -> BaseModel:
    """The validated options of ``name``. The plugin's module is imported, but nothing is built.

    The class's ``Options`` model declares the options; a class without one takes those of its constructor.
    ``Parts`` of a class with ``Options`` declares which options name other plugins (option -> kind); their options,
    ``<option>_options``, are validated too. Raises ``ConfigError`` with one line a wrong field.
    """
    plugin = load(kind, name)
    try:
        checked = accepted(plugin).model_validate(dict(options or {}))
    except ValidationError as error:
        lines = (f"{singular(kind)} {name!r}: {'.'.join(at)}: {what}" for at, what in problems(error, accepted(plugin)))
        raise ConfigError("\n".join(lines)) from error
    for part in _parts(plugin, checked).values():
        check_options(*part)
    return checked


def build(kind: Kind, name: str, options: Mapping[str, object] | None = None) -> Any:
    """An instance of ``name`` with the options that ``check_options`` validated.

    A class with ``Options`` gets them as its only positional argument, and its ``Parts``, built, as keywords; a class
    without is called with keywords. Raises ``ConfigError``.
    """
    plugin = load(kind, name)
    checked = check_options(kind, name, options)
    if not hasattr(plugin, "Options"):
        return plugin(**{field: getattr(checked, field) for field in checked.model_fields_set})
    return plugin(checked, **{option: build(*part) for option, part in _parts(plugin, checked).items()})


def accepted(plugin: type[Any]) -> type[BaseModel]:
    """The options that a plugin declares."""
    return getattr(plugin, "Options", None) or _options_of_constructor(plugin)


def _parts(plugin: type[Any], options: BaseModel) -> dict[str, tuple[Kind, str, Mapping[str, object] | None]]:
    """The plugins that a plugin is made of, as arguments of ``build``."""
    declared: Mapping[str, Kind] = getattr(plugin, "Parts", {}) if hasattr(plugin, "Options") else {}
    return {
        option: (kind, getattr(options, option), getattr(options, f"{option}_options", None))
        for option, kind in declared.items()
    }


def target_of(kind: Kind, name: str) -> str:
    """``module:Class`` of a name. Raises ``ConfigError`` for an unknown one. Imports nothing."""
    found = BUILTINS.get(kind, {}).get(name) or installed(kind).get(name)
    if found is not None:
        return found
    if _TARGET.match(name):
        return name
    if kind == "environments" and ":" not in name:
        family = name.partition("/")[0]
        return BUILTINS[kind].get(family) or installed(kind).get(family) or BUILTINS[kind]["web"]
    raise ConfigError(unknown_name(singular(kind), name, names(kind)) + ', or "module:Class"')


@cache  # an entry point of each installed distribution is read, a tenth of a second in all
def installed(kind: Kind) -> dict[str, str]:
    """Name -> target of the entry points of a kind, as they were when the process first asked."""
    return {point.name: point.value for point in entry_points(group=f"openhands_rl_plugin.{kind}")}


def _options_of_constructor(plugin: type[Any]) -> type[BaseModel]:
    hints = get_type_hints(plugin.__init__)
    parameters = inspect.signature(plugin).parameters.values()
    fields: dict[str, Any] = {
        parameter.name: (
            hints.get(parameter.name, Any),
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(f"{plugin.__name__}Options", __config__=config, **fields)


def singular(kind: Kind) -> str:
    """``"strategies"`` -> ``"strategy"``."""
    return {"strategies": "strategy"}.get(kind, kind.removesuffix("s").replace("_", " "))
