"""The engine that samples in the place of the SDK's LLM: of ``[rl.serving] base_url``, or one that a program gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from openhands_rl_plugin.config.build import make_engine
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.protocols import LLMEngine

_OPENAI = "openai"
_MOST = 16

_lock = threading.Lock()
_made: dict[str, LLMEngine] = {}
_given: list[LLMEngine] = []


@contextmanager
def sampling_from(engine: LLMEngine) -> Iterator[None]:
    """Until the end of the block, episodes that begin in this process are sampled from ``engine``: a
    ``TransformersEngine``, say, for a model in this process. It is used on the loop of ``core.concurrency``."""
    _given.append(engine)
    try:
        yield
    finally:
        _given.remove(engine)


def engine_for(settings: RLSettings, *, model: str, base_model: str) -> LLMEngine | None:
    """The engine for the served name ``model``; ``None`` where the SDK's own LLM is to be asked.

    Engines are shared by the conversations of a process. Raises ``ConfigError``.
    """
    if _given:
        return _given[-1]
    if settings.engine == AUTO and not settings.serving.base_url:
        return None
    named = settings.model_copy(update={"engine": _OPENAI}) if settings.engine == AUTO else settings
    key = "\0".join((model, base_model, named.engine, str(named.engine_options), named.serving.model_dump_json()))
    with _lock:
        if key not in _made:
            while len(_made) >= _MOST:
                del _made[next(iter(_made))]
            _made[key] = make_engine(named, model=model, base_model=base_model, base_url=named.serving.base_url)
        return _made[key]
