"""Options of the embedded server, its errors, and whether a model can be loaded. Light: it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.servers import API_KEY, AccessRules, required_key

if TYPE_CHECKING:
    from openhands_rl_plugin.config.rl import RLSettings

GIB = 1024**3
DEFAULT_ADAPTERS = "~/.openhands/rl_adapters"


class GeneratorConfig(BaseModel):
    """Options of the generator: the model, its format in memory, and the bounds of concurrent work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="Directory (or hub name) of a Hugging Face causal LM; smollm2-135m.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: bfloat16 where the processor multiplies it natively, else float32."
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: cuda when there is one, else cpu."
    )
    max_model_len: int | None = Field(
        default=None, ge=16, description="Longest prompt + answer, tokens; None: the model's."
    )
    max_batch: int = Field(default=16, ge=1, le=256, description="Sequences generated at once.")
    max_queue: int = Field(default=512, ge=1, description="Requests that may wait; one more is refused.")
    prefill_tokens: int | None = Field(
        default=None,
        ge=16,
        description="Prompt tokens computed per step, in addition to decoding; None: 256, on a GPU 2048.",
    )
    max_adapters: int = Field(default=8, ge=1, description="LoRA adapters held at once.")
    cache_bytes: int = Field(default=GIB, ge=0, description="Bound of the prefix cache; 0 turns it off.")
    kv_bytes: int = Field(
        default=8 * GIB,
        ge=1024**2,
        description="Bound of the sequences' keys and values; shortens max_model_len to fit.",
    )
    threads: int | None = Field(default=None, ge=1, description="torch threads; None: torch's own choice.")


class ServerConfig(GeneratorConfig):
    """The generation core behind HTTP."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; any but loopback needs a key.")
    port: int = Field(default=8100, ge=0, le=65535, description="0 takes a free port.")
    served_model_name: str | None = Field(default=None, description="Name of the base model; None: `model` as given.")
    api_key_env: str = Field(
        default=API_KEY,
        description="Environment variable with the key; no key is asked for when it is unset or empty.",
    )
    chat_template: str | None = Field(
        default=None, description="File with a Jinja chat template; None: the model's own."
    )
    adapters: str | None = Field(
        default=None,
        description="Folder of adapter versions: those in use are loaded at the start, and clients load from it only. "
        f"None: clients load from {DEFAULT_ADAPTERS}.",
    )
    preload: bool = Field(default=True, description="Load the versions in use of `adapters` at the start.")
    max_body_bytes: int = Field(default=4 * 1024**2, ge=1024, description="Longest request body.")

    def access(self) -> AccessRules:
        """Who is let in. Raises ``ConfigError`` when a network address has no key."""
        return AccessRules(required_key(self.host, self.api_key_env, protects="the model and load adapters"))

    @property
    def base_name(self) -> str:
        """The name under which the model without an adapter is served."""
        return self.served_model_name or self.model


# Each error has the HTTP status and the error type that vLLM gives for it.


class ServingError(RLError):
    """A refused request (or start); ``str()`` is one line that names the cause. ``param``: the field at fault."""

    status = 400
    kind = "BadRequestError"

    def __init_subclass__(cls, *, status: int, kind: str) -> None:
        super().__init_subclass__()
        cls.status, cls.kind = status, kind

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidUserInput(ServingError, status=400, kind="InvalidUserInput"):
    """A field is missing or has an invalid value."""


class NotFound(ServingError, status=404, kind="NotFoundError"):
    """A model, an adapter or a path does not exist."""


class Overloaded(ServingError, status=503, kind="ServiceUnavailableError"):
    """The queue is full, or the server is stopping."""


class StartError(ServingError, status=500, kind="InternalServerError"):
    """The server cannot start: no such model, the port is taken, an unsupported architecture."""


class GenerationFailed(ServingError, status=500, kind="InternalServerError"):
    """This sequence could not be computed; the others go on."""


class UpstreamFailure(ServingError, status=502, kind="UpstreamError"):
    """An agent could not answer, because its model or a tool failed."""


_MOST_AT_ONCE, _LONGEST_QUEUE, _CACHE_BYTES = 256, 512, 256 * 1024**2


def server_options(settings: RLSettings, model: str) -> dict[str, Any]:
    """Fields of ``ServerConfig`` for the embedded server of a run, which is sized for the run and asked by it alone."""
    return {
        "model": model,
        "api_key_env": "",
        # "auto": a processor without bfloat16 does not emulate it token by token.
        "dtype": "float32" if settings.training.dtype == "float32" else "auto",
        "max_batch": min(settings.max_workers, _MOST_AT_ONCE),
        "max_queue": max(settings.max_workers, _LONGEST_QUEUE),
        "max_adapters": max(settings.loop.kept_versions + 1, settings.serving.max_adapters),
        "cache_bytes": _CACHE_BYTES,
        "adapters": str(settings.serving.adapters_directory.resolve()),
        "preload": False,
    }
