"""The model server of a run: the one that the settings name, or the embedded one, started for the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openhands_rl_plugin.cli.options.weights import at_server, given_weights
from openhands_rl_plugin.config.rl import RLSettings

_CACHE_BYTES = 256 * 1024**2
_MOST_AT_ONCE = 256
_LONGEST_QUEUE = 512


@contextmanager
def served_policy(settings: RLSettings, model: Path | None, directory: Path) -> Iterator[tuple[RLSettings, Path]]:
    """The settings with the server's address and base model, and the folder of its weights.

    ``model``: the weights' folder, which a server may also name itself. Without a server in ``[rl.serving]`` the
    embedded one runs until the block ends, with its log in ``directory``. Raises ``ConfigError`` without weights on
    this machine, ``InfrastructureError`` where the server does not answer.
    """
    from openhands_rl_plugin.cli.options.running import free_port, running_command

    if settings.serving.base_url:
        yield at_server(settings, model)
        return
    weights = given_weights(model)
    name = settings.serving.model or weights.name
    log = directory / "logs" / "serve.log"
    with running_command(_serve(settings, weights, name), free_port(), log) as url:
        own = {"base_url": f"{url}/v1", "base_urls": (), "model": name, "api_key_env": "", "server": "embedded"}
        yield settings.model_copy(update={"serving": settings.serving.model_copy(update=own)}), weights


def _serve(settings: RLSettings, model: Path, name: str) -> list[str]:
    """The command of the embedded server, sized for the run."""
    sizes = {
        "max-batch": min(settings.max_workers, _MOST_AT_ONCE),
        "max-queue": max(settings.max_workers, _LONGEST_QUEUE),
        "max-adapters": settings.loop.kept_versions + 1,
        "cache-bytes": _CACHE_BYTES,
        # "auto": a processor without bfloat16 does not emulate it token by token.
        "dtype": "float32" if settings.training.dtype == "float32" else "auto",
        "api-key-env": "",
        "adapters": settings.serving.adapters_directory.resolve(),
        "preload": "false",
    }
    words = ["serve", "--model", str(model), "--served-model-name", name]
    return [*words, *(f"--{option}={size}" for option, size in sizes.items())]
