"""The model behind an ``RLAgent``: in this process, or behind an OpenAI-compatible endpoint.

Either way there is a fixed base model, versions of one LoRA adapter in an ``AdapterStore``, and one of them (or none)
in use. Importing this loads no torch.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from openhands_rl_plugin.apps.agent.snapshot import Savable, snapshot
from openhands_rl_plugin.config.build import make_engine
from openhands_rl_plugin.config.rl import AUTO, IN_PROCESS, RLSettings
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError, PublishError
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.models.adapters.publisher import PreviousVersion, check_served_logprobs, publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.engines.server_models import local_weights, normalised_url, served_base
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import ServingError

_MAX_BATCH = 256
_MIN_QUEUE = 512


@runtime_checkable
class ClosableEngine(LLMEngine, Protocol):
    """An engine with connections to close. A capability of an engine, not a duty."""

    async def aclose(self) -> None:
        """Release what the engine holds."""
        ...


class Policy(ABC):
    """A base model and the version of its adapter that is in use.

    ``base_model`` is its name in trajectories and manifests; ``adapter`` is ``None`` while it is sampled as it is.
    """

    def __init__(self, base_model: str, settings: RLSettings) -> None:
        self.base_model = base_model
        # A server may have another working directory, so the paths that are sent to it must be absolute.
        self.store = AdapterStore(settings.serving.adapters_directory.resolve())
        self.adapter: Adapter | None = None
        self.settings = settings

    @property
    def served_model(self) -> str:
        """The name of the weights that are sampled from."""
        return self.base_model if self.adapter is None else self.adapter.name

    @property
    def kept(self) -> int:
        """Versions that stay loaded while a new one is checked."""
        return max(1, self.settings.serving.max_adapters - 1)

    async def resume(self) -> None:
        """Use the version that the store's pointer names, if it belongs to this base model."""
        current = self.store.current(self.settings.serving.adapter)
        if current is not None and current.base_model == self.base_model:
            await self.adopt(current)

    async def adopt(self, adapter: Adapter, probe: Probe | None = None) -> None:
        """Sample from ``adapter`` from now on; its logprobs are checked against ``probe`` first.

        Raises ``PublishError``; the previous version then stays in use.
        """
        await self.publish(adapter, probe)
        self.adapter = adapter

    @abstractmethod
    def engine(self) -> LLMEngine:
        """Completions from the version in use; the caller closes it, if it is a ``ClosableEngine``."""

    @abstractmethod
    def training_weights(self) -> str:
        """The base model's directory or cached name, to train on. Raises ``ConfigError`` when it is not known."""

    @abstractmethod
    async def publish(self, adapter: Adapter, probe: Probe | None) -> None:
        """Load, probe, move the pointer, unload older versions. Raises ``PublishError``."""

    @abstractmethod
    async def close(self) -> None:
        """Release what was started. Idempotent."""


class InProcessPolicy(Policy):
    """A model directory (or cached hub name) in the embedded generation core.

    Raises ``ServingError`` for a model that cannot be served, ``MissingExtraError`` without torch.
    """

    def __init__(self, model: str, tokenizer: Any, settings: RLSettings) -> None:
        super().__init__(model, settings)
        try:
            from openhands_rl_plugin.models.generator.generator import Generator
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "torch", "train") from error
        self._tokenizer = tokenizer
        config = {
            "model": model,
            # "auto": a processor without bfloat16 does not have to emulate it for every token.
            "dtype": "float32" if settings.training.dtype == "float32" else "auto",
            "max_batch": min(settings.max_workers, _MAX_BATCH),
            "max_queue": max(settings.max_workers, _MIN_QUEUE),
            "max_adapters": self.kept + 1,
        }
        self._generator = Generator(GeneratorConfig.model_validate(config))

    def engine(self) -> LLMEngine:
        """An engine on the shared generator, which keeps running when the engine is closed."""
        from openhands_rl_plugin.models.engines.transformers import TransformersEngine

        adapter = self.adapter.name if self.adapter is not None else None
        return TransformersEngine(self._generator, self._tokenizer, adapter=adapter, base_model=self.base_model)

    def training_weights(self) -> str:
        """The directory of the served base model."""
        return self.base_model

    async def publish(self, adapter: Adapter, probe: Probe | None) -> None:
        """The same steps as ``AdapterPublisher`` on a server: verify, load, probe, move the pointer, unload."""
        self.store.verify(adapter)
        if probe is not None:
            self.store.keep_probe(adapter, probe)
        await asyncio.to_thread(self._load, adapter, probe or self.store.probe(adapter))
        self.store.point(adapter)
        loaded = [held.name for held in self._generator.adapters if held.name != adapter.name]
        for name in loaded[: max(0, len(loaded) - (self.kept - 1))]:
            await asyncio.wrap_future(self._generator.unload_adapter(name))

    async def close(self) -> None:
        """Stop the generator."""
        await asyncio.to_thread(self._generator.close)

    def _load(self, adapter: Adapter, probe: Probe | None) -> None:
        try:
            self._generator.load_adapter(adapter.name, Path(adapter.path))
            served = self._logprobs(adapter, probe.token_ids) if probe is not None else []
        except ServingError as error:
            raise PublishError(str(error)) from error
        try:
            if probe is not None:
                former = self.store.previous_probe(adapter, probe.token_ids)
                check_served_logprobs(
                    adapter.name, served, probe, former and PreviousVersion(former[0], former[1].logprobs)
                )
        except PublishError:
            self._generator.unload_adapter(adapter.name).result()
            raise

    def _logprobs(self, adapter: Adapter, token_ids: Sequence[int]) -> list[float]:
        """The logprobs of all tokens but the first."""
        from openhands_rl_plugin.models.generator.sampling import DecodingParams

        params = DecodingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompt = self._generator.generate(token_ids, params, adapter=adapter.name).prompt or ()
        return [math.nan if seen is None else seen.logprob for seen in prompt[1:]]


class EndpointPolicy(Policy):
    """A server that is already running. ``weights``: its base model's directory, if the server does not report it.

    Raises ``ConfigError`` when the base model is ambiguous, ``InfrastructureError`` when the server does not answer.
    """

    def __init__(self, url: str, weights: Path | None, settings: RLSettings) -> None:
        serving = settings.serving
        self._url = normalised_url(url)
        self._key = serving.api_key()
        base = served_base(self._url, serving.model, self._key, serving.request_timeout)
        super().__init__(base.name, settings)
        self._weights = weights or base.weights
        reached = serving.model_copy(update={"base_url": self._url})
        self._publisher = publisher_for(reached, self.store, keep=self.kept)
        self._asked = base.name

    def engine(self) -> LLMEngine:
        """An engine with its own connections: that of ``[rl] engine``."""
        if self.settings.engine != AUTO:
            return make_engine(self.settings, model=self.served_model, base_model=self.base_model, base_url=self._url)
        timeout = self.settings.serving.request_timeout
        return OpenAIEngine(self.served_model, self._url, self._key, base_model=self.base_model, timeout=timeout)

    def training_weights(self) -> str:
        """The directory that was given, or the one that the server serves from when that is on this machine."""
        if self._weights is None:
            raise ConfigError(
                f"the weights of {self.base_model!r} are not on this machine (its server names no local directory as "
                "root): pass the model's directory, RLAgent(model=url, tokenizer='path/to/model')"
            )
        return str(self._weights)

    @property
    def served_model(self) -> str:
        """The model name to request from this kind of server."""
        return self.base_model if self.adapter is None else self._asked

    async def publish(self, adapter: Adapter, probe: Probe | None) -> None:
        """Through the server's adapter routes."""
        await self._publisher.publish(adapter, probe)
        self._asked = await self._publisher.served_model(adapter)

    async def close(self) -> None:
        """Close the connections; the server and its adapters stay."""
        await self._publisher.aclose()


class EnginePolicy(Policy):
    """A ``model`` that only the engine of ``[rl] engine`` can reach: episodes are run, but not trained here."""

    def engine(self) -> LLMEngine:
        """A new engine of that kind."""
        return make_engine(self.settings, model=self.base_model, base_model=self.base_model)

    def training_weights(self) -> str:
        """Raises ``ConfigError``: nothing is known of the weights."""
        raise ConfigError(
            f"[rl] engine: no adapter can be given to {self.settings.engine!r}; train its episodes with `openhands-rl "
            "train`, or pass the URL of a server as the model"
        )

    async def resume(self) -> None:
        """There is no adapter to resume with."""

    async def publish(self, adapter: Adapter, probe: Probe | None) -> None:
        """Raises ``PublishError``: there is no server to publish to."""
        raise PublishError(f"[rl] engine: {adapter.name} cannot be given to {self.settings.engine!r}")

    async def close(self) -> None:
        """Nothing was started."""


def open_policy(model: object, tokenizer: object, settings: RLSettings) -> Policy:
    """The policy for ``model``: an endpoint's URL, a directory or hub name, or a model object.

    Raises ``ConfigError`` when model and tokenizer do not go together.
    """
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        if settings.engine == IN_PROCESS:
            raise ConfigError("[rl] engine: 'transformers' runs a model's directory; for a server's URL use 'openai'")
        return EndpointPolicy(model, _weights_of_endpoint(tokenizer), settings)
    if settings.engine == "openai":
        raise ConfigError("[rl] engine: 'openai' asks a server: pass its URL as the model, or leave the line out")
    if settings.engine not in (AUTO, IN_PROCESS) and isinstance(model, str | Path):
        return EnginePolicy(str(model), settings)
    if isinstance(model, str | Path):
        name = str(local_weights(model) or model)
        if isinstance(tokenizer, str | Path):
            if str(local_weights(tokenizer) or tokenizer) != name:
                raise ConfigError("the tokenizer belongs to another model: pass a tokenizer object, or leave it out")
            tokenizer = None
        return InProcessPolicy(name, _fast(tokenizer), settings)
    if not isinstance(model, Savable):
        raise ConfigError(
            f"model must be a transformers model, a directory or name, or an endpoint's URL, not {type(model).__name__}"
        )
    if tokenizer is None or not isinstance(tokenizer, Savable):
        raise ConfigError("a model object needs its tokenizer object: RLAgent(model, tokenizer, config)")
    _fast(tokenizer)
    directory = snapshot(model, tokenizer, settings.serving.adapters_directory)
    return InProcessPolicy(str(directory), None, settings)


def _weights_of_endpoint(tokenizer: object) -> Path | None:
    if not isinstance(tokenizer, str | Path):
        return None  # the server has its own tokenizer, so an object is of no use here and does no harm
    if (weights := local_weights(tokenizer)) is None:
        raise ConfigError(f"tokenizer: {str(tokenizer)!r:.200} is not a model's directory (it has no config.json)")
    return weights


def _fast(tokenizer: Any) -> Any:
    if tokenizer is not None and not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"a fast tokenizer is needed (AutoTokenizer.from_pretrained), not {type(tokenizer).__name__}")
    return tokenizer
