"""What OpenRLHF gives an agent: sampling parameters, a tokenizer, and an engine that answers as vLLM does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openhands_rl_plugin.core.types import Message, Observation
from openhands_rl_plugin.testing import GridEnvironment

GRID = "openhands_rl_plugin.testing:GridEnvironment"


@dataclass
class VllmParams:
    """The fields of vLLM's ``SamplingParams`` that OpenRLHF sets or reads."""

    max_tokens: int | None = None
    logprobs: int | None = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)


class ScriptedVllm:
    """Says the texts of a script, as ids; ``prompts`` and ``asked`` hold what it was given.

    A text is cut to ``max_tokens``; one that ends with a tilde is cut there, without the end of its turn.
    """

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.prompts: list[list[int]] = []
        self.asked: list[VllmParams] = []
        self._tokenizer = tokenizer
        self._texts = texts

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        text = self._texts[len(self.prompts) % len(self._texts)]
        self.prompts.append(list(prompt_token_ids))
        self.asked.append(sampling_params)
        ids = self._tokenizer.encode(text.removesuffix("~"), add_special_tokens=False)
        whole = ids if text.endswith("~") else [*ids, self._tokenizer.eos_token_id]
        kept = whole[: sampling_params.max_tokens]
        ended = kept[-1:] == [self._tokenizer.eos_token_id]
        logprobs = [{token: SimpleNamespace(logprob=-0.5 - at)} for at, token in enumerate(kept)]
        output = SimpleNamespace(
            token_ids=kept,
            text=self._tokenizer.decode(kept, skip_special_tokens=False),
            finish_reason="stop" if ended else "length",
            logprobs=logprobs if sampling_params.logprobs is not None else None,
        )
        return SimpleNamespace(outputs=[output])


class BrokenGrid(GridEnvironment):
    """Every other episode's first step fails."""

    broken = 0

    async def step(self, action: Message) -> Observation:
        type(self).broken += 1
        if type(self).broken % 2:
            raise ConnectionError("the world went away")
        return await super().step(action)


def write_config(path: Path, *lines: str, environment: str = GRID) -> Path:
    """A config.toml with an ``[rl]`` section."""
    path.write_text("\n".join(["[rl]", f'env_name = "{environment}"', *lines]) + "\n", encoding="utf-8")
    return path
