"""On-policy distillation: a teacher's logprobs of what the policy sampled, which the advantages of tokens are made of.

The gradient is that of KL(policy || teacher) at each sampled token, as in Agarwal et al. 2024 (arXiv
2306.13649) and Thinking Machines Lab 2025, "On-Policy Distillation". With ``opsd`` the teacher is the policy itself,
behind a prompt with a hint (Penaloza et al. 2026, arXiv 2602.04942).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Mask
from openhands_rl_plugin.core.errors import ConfigError, PublishError, TrainingError
from openhands_rl_plugin.core.types import Adapter, Sample, Trajectory
from openhands_rl_plugin.models.adapters.publisher import ModelServer, RefusedByServer
from openhands_rl_plugin.training.algorithms import ALGORITHMS
from openhands_rl_plugin.training.data.dataset import Episodes, TrainingDataset
from openhands_rl_plugin.training.data.demonstrations import ChatTokenizer, TokenMaker, load_tokenizer, turns_for

HINT = "\n\nA hint, for you alone; answer as if you did not have it:\n\n{}"
_PROBE = "def f(x):\n\treturn {'a': x ** 2}  # naïve 你好 🙂 0123456789\n"
_AT_ONCE = 8


class ServedTeacher:
    """A model of a server with vLLM's ``prompt_logprobs``. Raises ``PublishError`` where it cannot be reached."""

    def __init__(self, base_url: str, model: str, api_key: str | None = None) -> None:
        self._http, self._model = ModelServer(base_url, api_key=api_key, timeout=600.0), model

    async def logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """Logprobs (nats) of ids 1 .. T-1, each given the ids before it; ``None`` for an id without one.

        All are ``None`` for a sequence that the server refuses, such as one that is too long.
        """
        try:
            return await self._http.prompt_logprobs(self._model, token_ids)
        except PublishError as error:
            if "HTTP 400 " not in str(error):  # it is away, or has no such model
                raise
            return [None] * (len(token_ids) - 1)

    async def encode(self, text: str) -> list[int] | None:
        """The ids of a text, without special tokens, by ``POST /tokenize``; ``None`` where it gives none."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            return await self._http.ask("tokenize", body, "there is no /tokenize", lambda answer: answer.get("tokens"))
        except RefusedByServer:
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class LocalTeacher(ServedTeacher):
    """A model in this process, with the adapter in a folder if one is given, served on the loopback address."""

    def __init__(self, model: Path, adapter: Path | None = None, *, dtype: str = "auto") -> None:
        from openhands_rl_plugin.models.generator.config import ServerConfig
        from openhands_rl_plugin.models.generator.generator import Generator
        from openhands_rl_plugin.models.server.app import running_server

        config = ServerConfig.model_validate({"model": str(model), "dtype": dtype, "port": 0, "api_key_env": ""})
        with ExitStack() as opened:
            generator = opened.enter_context(Generator(config))
            if adapter is not None:
                generator.load_adapter(adapter.name, adapter)
            url = opened.enter_context(running_server(config, generator))
            super().__init__(f"{url}/v1", config.base_name if adapter is None else adapter.name)
            self._opened = opened.pop_all()

    async def aclose(self) -> None:
        """Stop the server, and free the model."""
        await super().aclose()
        await asyncio.to_thread(self._opened.close)


def teacher_of(settings: TrainingSettings, model: Path, parent: Adapter | None) -> ServedTeacher:
    """The teacher that the settings name; with ``opsd`` the version that training starts from.

    ``model``: the folder of the base model. Raises ``ConfigError``.
    """
    named = settings.teacher
    if named.startswith(("http://", "https://")):
        return ServedTeacher(named, settings.teacher_model or model.name)
    if not named:
        return LocalTeacher(model, Path(parent.path) if parent is not None else None, dtype=settings.dtype)
    folder = Path(named).expanduser()
    if (folder / "adapter_config.json").is_file():
        return LocalTeacher(model, folder, dtype=settings.dtype)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"[rl.training] teacher = {named!r} is no URL, and no folder of a model or an adapter")
    return LocalTeacher(folder, dtype=settings.dtype)


async def taught_dataset(
    dataset: TrainingDataset,
    episodes: Episodes,
    settings: TrainingSettings,
    model: Path,
    parent: Adapter | None,
    policy: Callable[[], ServedTeacher] | None = None,
) -> TrainingDataset:
    """The dataset with the teacher's logprobs, where the settings name one; what is imitated or preferred has no use
    for them. ``policy``: where ``parent`` is served, as its own teacher. Raises as ``with_teacher``."""
    if not settings.taught or not dataset.samples or ALGORITHMS[dataset.algorithm].kind != "reinforcement":
        return dataset
    chosen = policy() if policy is not None and not settings.teacher else teacher_of(settings, model, parent)
    async with aclosing(chosen) as teacher:
        return await with_teacher(dataset, episodes, settings, teacher, load_tokenizer(str(model)))


async def with_teacher(
    dataset: TrainingDataset,
    episodes: Episodes,
    settings: TrainingSettings,
    teacher: ServedTeacher,
    tokenizer: ChatTokenizer,
) -> TrainingDataset:
    """The dataset of these episodes with the teacher's logprobs, without the sampled tokens that have none. With
    ``opsd`` episodes without a hint are left out, and counted as such.

    Raises ``TrainingError`` for another tokenizer, and for what was not sampled at temperature 1.
    """
    theirs = await teacher.encode(_PROBE)
    if theirs is not None and theirs != tokenizer.encode(_PROBE, add_special_tokens=False):
        raise TrainingError(
            "the teacher has another tokenizer: its logprobs are of other tokens; choose another teacher"
        )
    prompts = hints(episodes, settings.hint) if settings.algorithm == "opsd" else None
    samples = [each for each in dataset.samples if prompts is None or each.trajectory_id in prompts]
    without = {each.trajectory_id for each in dataset.samples} - {each.trajectory_id for each in samples}
    if any({sample.temperature, *sample.token_temperatures} != {1.0} for sample in samples):
        raise TrainingError("a teacher scores at temperature 1: roll out at [rl.sampling] temperature = 1.0")
    of = {each.id: each for each in episodes.trajectories}
    maker, limit = TokenMaker(tokenizer), asyncio.Semaphore(_AT_ONCE)

    async def scored(sample: Sample) -> Sample | None:
        ids: Sequence[int] = sample.input_ids
        if prompts is not None:
            hint, first = prompts[sample.trajectory_id], sample.mask.index(True)
            node = sample.spans[0][0] if sample.spans else sample.leaf
            ids = (*_hinted(of[sample.trajectory_id], node, hint, maker), *ids[first:])
        async with limit:
            found = await teacher.logprobs(ids)
        shift = len(ids) - len(sample.input_ids) - 1  # a teacher that cuts a sequence short gives none at its end
        values = [found[at + shift] if own and at + shift < len(found) else None for at, own in enumerate(sample.mask)]
        mask = Mask(value is not None for value in values)
        update = {"mask": mask, "teacher_logprobs": Floats(value or 0.0 for value in values)}
        return sample.model_copy(update=update) if True in mask else None

    made = await asyncio.gather(*map(scored, samples))
    kept = [sample for sample in made if sample is not None]
    untaught = sum(sum(each.mask) for each in samples) - sum(sum(each.mask) for each in kept)
    used, excluded = len({each.trajectory_id for each in kept}), dataset.excluded + Counter(no_hint=len(without))
    return replace(dataset, samples=tuple(kept), used=used, excluded=excluded, untaught=untaught)


def hints(episodes: Episodes, path: str) -> dict[str, str]:
    """The hint of each episode that has one, by its id. ``path``: ``task.KEY`` of the task's data, ``evidence.KEY``
    with more keys behind it, or ``solved``, the best other attempt of the same group with a reward above 0."""
    found: dict[str, str] = {}
    scored = list(zip(episodes.trajectories, episodes.rewards, strict=True))
    for one in episodes.trajectories:
        if path == "solved":
            others = [(reward, each.id, each) for each, reward in scored if each.group_id == one.group_id and reward]
            best = max((other for other in others if other[0] > 0 and other[1] != one.id), default=None)
            hint = _actions(best[2]) if best is not None else ""
        else:
            hint = _value({"task": one.task.data, "evidence": one.evidence}, path.split("."))
        if hint:
            found[one.id] = hint
    return found


def _value(data: object, keys: Sequence[str]) -> str:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False) if data else ""


def _actions(trajectory: Trajectory) -> str:
    """The actions of an attempt as text, call by call."""
    messages = [trajectory.nodes[at].message for at in trajectory.acted()]
    calls = [[f"{call.name}({call.arguments})" for call in message.tool_calls] for message in messages]
    return "\n\n".join("\n".join(filter(None, (m.content, *own))) for m, own in zip(messages, calls, strict=True))


def _hinted(trajectory: Trajectory, node: int, hint: str, maker: TokenMaker) -> tuple[int, ...]:
    """The ids of the prompt of the answer ``node``, with the hint behind the first user message."""
    turns, tools = turns_for(trajectory, maker.traits, trajectory.nodes[node].parent)
    wire = [turn.wire for turn in turns]
    at = next((at for at, each in enumerate(wire) if each["role"] == "user"), len(wire) - 1)
    wire[at] = {**wire[at], "content": f"{wire[at]['content'] or ''}{HINT.format(hint)}"}
    return maker.ids(maker.render(wire, tools, True))
