"""TRL's side of ``grpo``, for a process of its own: ``python -m evaluation.performance.grpo.trl_side JOB``.

``GRPOTrainer`` with a ``rollout_func`` that rolls out the same episodes as the demo: same first prompt, pages, limits
and token ids. Each turn of all unfinished episodes is one batch. The loss masks the shop's tokens.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from evaluation.performance.grpo.budget import CpuBudget, Job
from evaluation.performance.grpo.ours import WARM_START, has_episodes
from evaluation.performance.grpo.turns import Kind, make_turns
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.demo.runs import ANSWER_TOKENS, CONTEXT_TOKENS, DemoOptions, shop_tasks
from openhands_rl_plugin.contrib.webshop import WebShop, WebShopSession
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.environments.http.client import action_language, opening_messages
from openhands_rl_plugin.environments.http.react import parse_plain
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, str]]

PASS_EPISODES = 2
"""Episodes of a forward pass: with padding about as many tokens as a micro-batch of the demo's trainer."""

CHECKED = 32
"""How many stored episodes are replayed and compared before training."""


@dataclass
class Episode:
    """One episode as token ids: ``opening``, then sampled tokens (mask 1) and observations of the shop (mask 0)."""

    session: WebShopSession
    opening: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    live: bool = True

    @property
    def ids(self) -> list[int]:
        """The prompt of the next turn."""
        return self.opening + self.completion


class Dialogue:
    """Token ids by the chat template, turn by turn; sampled tokens are kept and never tokenised again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._head = self._ids([{"role": "system", "content": ""}, {"role": "assistant", "content": ""}], False)
        eos = tokenizer.eos_token_id
        assert isinstance(eos, int)
        self._eos = eos
        while self._head[-1] != self._eos:
            self._head.pop()

    def opening(self, messages: Chat) -> list[int]:
        """The whole first prompt."""
        return self._ids(messages, True)

    def after(self, sampled: Sequence[int], page: str) -> list[int]:
        """Ids after a completion: its end of turn, unless sampled, the page, and the start of the next turn."""
        turn = [{"role": "system", "content": ""}, {"role": "assistant", "content": ""}]
        ids = self._ids([*turn, {"role": "user", "content": page}], True)[len(self._head) :]
        return ids if sampled[-1] == self._eos else [self._eos, *ids]

    def text(self, sampled: Sequence[int]) -> str:
        """The text of a completion, for the shop to parse."""
        return str(self._tokenizer.decode(list(sampled), skip_special_tokens=True))

    def _ids(self, messages: Chat, add_generation_prompt: bool) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return cast(list[int], list(ids))


def opening_chat(shop: WebShop, task: Task) -> Chat:
    """The messages that open an episode."""
    state = shop.session(goal_of(task)).observation
    messages = opening_messages(task, state, react_format=False, actions=action_language(task.environment))
    return [{"role": message.role, "content": message.content or ""} for message in messages]


def goal_of(task: Task) -> int:
    """The shop's number of the task."""
    goal = task.data["idx"]
    assert isinstance(goal, int)
    return goal


class Rollouts:
    """TRL's ``rollout_func``: the episodes of a generation batch, one turn of all live ones at a time."""

    def __init__(self, shop: WebShop, dialogue: Dialogue, tasks: Sequence[Task], *, max_turns: int, kind: Kind) -> None:
        self._shop = shop
        self._dialogue = dialogue
        self._max_turns = max_turns
        self._kind: Kind = kind
        self._goals = {opening_chat(shop, task)[-1]["content"]: goal_of(task) for task in tasks}
        if len(self._goals) < len(tasks):
            raise SystemExit("two training goals have the same text: TRL's rollout_func cannot tell them apart")
        self.figures: dict[str, float] = {}
        """Figures of the last batch, until they are logged."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Roll out an episode of every prompt (a ``Chat``); TRL repeats a task's prompt for each of its samples."""
        began, generating = time.process_time(), 0.0
        episodes = [
            Episode(self._shop.session(self._goals[prompt[-1]["content"]]), self._dialogue.opening(prompt))
            for prompt in prompts
        ]
        turns = make_turns(self._kind, trainer)
        while live := [row for row, episode in enumerate(episodes) if episode.live]:
            asked = time.process_time()
            answers = turns.answers(live, [episodes[row].ids for row in live])
            generating += time.process_time() - asked
            for row, sampled in zip(live, answers, strict=True):
                self.take(episodes[row], sampled)
        self.figures = _figures(episodes, rollout=time.process_time() - began, generating=generating)
        return {
            "prompt_ids": [episode.opening for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "logprobs": None,
            "env_mask": [episode.mask for episode in episodes],
            "episode_return": [episode.reward for episode in episodes],
        }

    def take(self, episode: Episode, sampled: list[int]) -> None:
        """Execute an answer; the page is appended if another turn follows."""
        episode.completion += sampled
        episode.mask += [1] * len(sampled)
        episode.turns += 1
        parsed = parse_plain(self._dialogue.text(sampled))
        if parsed.action is None:
            page, done = parsed.error or "", False
        else:
            result = episode.session.step(parsed.action)
            episode.reward += result.reward
            page, done = result.state, result.done
        page_ids = self._dialogue.after(sampled, page)
        longest = CONTEXT_TOKENS - ANSWER_TOKENS
        episode.live = not done and episode.turns < self._max_turns and len(episode.ids) + len(page_ids) <= longest
        if episode.live:
            episode.completion += page_ids
            episode.mask += [0] * len(page_ids)


async def check_against_engine(job: Job, rollouts: Rollouts, dialogue: Dialogue, shop: WebShop) -> int:
    """Replay some stored episodes: token ids, mask and return must equal those that the engine recorded.

    Returns how many were compared. Episodes whose completions the template renders as other tokens are skipped, because
    they are several sequences for the engine. Exits at a difference.
    """
    compared = 0
    where = TrajectoryFilter(run_id=f"demo-{job.seed}/{WARM_START}", failed=False)
    async with FileTrajectoryStorage(job.run / "trajectories") as storage:
        async for stored, _ in storage.find(where):
            recorded = [node.tokens for node in stored.sampled() if node.tokens is not None]
            if not all(tokens.extends for tokens in recorded[1:]):
                continue
            episode = Episode(shop.session(goal_of(stored.task)), dialogue.opening(opening_chat(shop, stored.task)))
            ids: list[int] = []
            mask: list[int] = []
            for tokens in recorded:
                ids += [*tokens.prompt_ids, *tokens.sampled_ids]
                mask += [0] * len(tokens.prompt_ids) + [1] * len(tokens.sampled_ids)
                rollouts.take(episode, list(tokens.sampled_ids))
            again = (episode.ids, [0] * len(episode.opening) + episode.mask, episode.reward, episode.live)
            if again != (ids, mask, stored.episode_return, False):
                raise SystemExit(f"episode {stored.id} of {job.run} differs when TRL's side replays it")
            compared += 1
            if compared == CHECKED:
                break
    return compared


def _figures(episodes: Sequence[Episode], *, rollout: float, generating: float) -> dict[str, float]:
    count = len(episodes)
    return {
        "episodes": count,
        "success": sum(episode.reward >= 0.999 for episode in episodes) / count,
        "reward": sum(episode.reward for episode in episodes) / count,
        "turns": sum(episode.turns for episode in episodes) / count,
        "tokens": sum(len(episode.ids) for episode in episodes),
        "sampled_tokens": sum(sum(episode.mask) for episode in episodes),
        "rollout_cpu_seconds": rollout,
        "generate_cpu_seconds": generating,
    }


def episode_return(completions: list[Any], episode_return: list[float], **kwargs: object) -> list[float | None]:
    """TRL's reward function: the return of the shop's episode."""
    return [*episode_return]


def train(job: Job) -> None:
    """Train until the budget is spent, which ends the process."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    disable_progress_bars()
    torch.set_num_threads(job.threads)
    options = DemoOptions(
        run_directory=job.out, seed=job.seed, tasks_per_iteration=job.tasks, samples_per_task=job.samples
    )
    shop = WebShop()
    tasks = [entry.task for entry in shop_tasks(options).training]
    tokenizer: Any = AutoTokenizer.from_pretrained(job.model)
    dialogue = Dialogue(tokenizer)
    rollouts = Rollouts(shop, dialogue, tasks, max_turns=options.max_turns, kind=job.generation)
    checked = asyncio.run(check_against_engine(job, rollouts, dialogue, shop)) if has_episodes(job.run) else 0
    print(f"{checked} stored episodes are the same token by token", flush=True)
    budget = CpuBudget(60 * job.minutes, job.out / "marks.jsonl")
    budget.end_process_when_spent()

    class Publish(TrainerCallback):
        """Notes the adapter of every optimiser step, with TRL's own figures of it."""

        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            budget.begin()

        def on_log(self, args: object, state: Any, control: object, **kwargs: Any) -> None:
            step = state.global_step
            adapter = job.out / "adapters" / f"step-{step:04d}"
            trainer.model.save_pretrained(adapter)  # pyrefly: ignore[missing-attribute]
            own = {f"trl/{name}": value for name, value in kwargs["logs"].items() if isinstance(value, float)}
            figures, rollouts.figures = own | rollouts.figures, {}
            if budget.mark(step, adapter, figures):
                shutil.rmtree(adapter.with_name(f"step-{step - 1:04d}"), ignore_errors=True)

    base = AutoModelForCausalLM.from_pretrained(job.model, dtype="float32")
    model = PeftModel.from_pretrained(base, job.adapter, is_trainable=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=episode_return,
        args=settings(job),
        train_dataset=Dataset.from_list([{"prompt": opening_chat(shop, task)} for task in tasks]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[Publish()],
        optimizers=optimizers(model, job, options.settings().training),
    )
    trainer.train()


def optimizers(model: torch.nn.Module, job: Job, training: TrainingSettings) -> tuple[Any, Any]:
    """TRL's AdamW, with the demo's warm-up and then a constant rate: TRL's own schedules have an end or begin at 0."""
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR

    rate = job.trl_learning_rate or training.learning_rate
    steps = training.warmup_steps + 1
    adam = AdamW([each for each in model.parameters() if each.requires_grad], lr=rate, weight_decay=0.0, fused=True)
    return adam, LambdaLR(adam, lambda step: min(1.0, (step + 1) / steps))


def settings(job: Job) -> Any:
    """TRL's defaults, but for what makes the sides alike and for what suits this small model on a processor.

    Alike: sampling, groups, and how many episodes make a generation and a step. Recomputed activations are off, because
    they only cost time here.
    """
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(job.out / "trl"),
        num_generations=job.samples,
        generation_batch_size=job.tasks * job.samples,
        per_device_train_batch_size=PASS_EPISODES,
        gradient_accumulation_steps=job.step_episodes // PASS_EPISODES,
        max_completion_length=ANSWER_TOKENS,
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        max_steps=1_000_000,
        seed=job.seed,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Train for the job of the command line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from openhands_rl_plugin.models.generator.threads import prepare_threads

    prepare_threads()
    train(Job.model_validate_json(sys.argv[1]))


if __name__ == "__main__":
    main()
