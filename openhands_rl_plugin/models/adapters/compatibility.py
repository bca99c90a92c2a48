"""Whether servers can serve an adapter, checked before anything is sent to one."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.core.errors import PublishError, describe
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.peft_format import CONFIG_FILE, UNSUPPORTED_OPTIONS
from openhands_rl_plugin.models.adapters.servers import Capacity

# vLLM computes prompt_logprobs without LoRA on these modules, so that no probe could verify them.
_UNVERIFIABLE = frozenset({"lm_head", "embed_tokens"})


class _PeftConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    peft_type: str = ""
    r: int
    bias: str = "none"
    rank_pattern: dict[str, int] | None = None
    target_modules: list[str] | str | None = None


def check_servable(adapter: Adapter, capacity: Capacity | None = None) -> None:
    """Raise ``PublishError`` unless a server (one of this ``capacity``) can serve ``adapter`` as it was trained."""
    config = _read(adapter)
    if config.peft_type != "LORA":
        raise _publish_error(adapter, f"its {CONFIG_FILE} is not that of a LoRA adapter")
    if config.bias != "none":
        raise _publish_error(adapter, f"bias = {config.bias!r} cannot be served; train with bias = 'none'")
    options = config.model_extra or {}
    if found := [name for name in UNSUPPORTED_OPTIONS if options.get(name)]:
        raise _publish_error(adapter, f"{', '.join(found)} cannot be served; train a plain LoRA or rsLoRA adapter")
    targets = _targets(config)
    if found := sorted(targets & _UNVERIFIABLE):
        raise _publish_error(
            adapter, f"an adapter of {', '.join(found)} cannot be verified; leave it out of target_modules"
        )
    if capacity is not None:
        _check_capacity(adapter, capacity, max([config.r, *(config.rank_pattern or {}).values()]), targets)


def _check_capacity(adapter: Adapter, capacity: Capacity, rank: int, targets: frozenset[str]) -> None:
    if capacity.rank is not None and rank > capacity.rank:
        raise _publish_error(
            adapter, f"its rank is {rank} and the server takes {capacity.rank}; start it with --max-lora-rank {rank}"
        )
    if capacity.targets is not None and (missing := sorted(targets - capacity.targets)):
        raise _publish_error(
            adapter,
            f"the server has no adapters of {', '.join(missing)}; start it with --lora-target-modules all",
        )


def _read(adapter: Adapter) -> _PeftConfig:
    path = Path(adapter.path) / CONFIG_FILE
    if not path.exists() and (Path(adapter.path) / "config.json").exists():
        raise _publish_error(adapter, f"it is a whole model and no adapter; start a server with {adapter.path}")
    try:
        return _PeftConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise _publish_error(adapter, f"{path} cannot be read: {describe(error)}") from error


def _targets(config: _PeftConfig) -> frozenset[str]:
    """The last parts of the modules' names; empty when they are given by a pattern."""
    if not isinstance(config.target_modules, list):
        return frozenset()
    return frozenset(name.rpartition(".")[2] for name in config.target_modules)


def _publish_error(adapter: Adapter, cause: str) -> PublishError:
    return PublishError(f"{adapter.name} was not published: {cause}")
