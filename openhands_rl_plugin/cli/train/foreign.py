"""Token ids for stored episodes that have none, and what is said about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import TrainingError

if TYPE_CHECKING:
    from openhands_rl_plugin.training.data.dataset import Episodes


def with_token_ids(episodes: Episodes, model: Path) -> Episodes:
    """The episodes, those without token ids rendered with the chat template of ``model``; prints how many, and why
    others cannot be. Raises ``TrainingError``."""
    from openhands_rl_plugin.training.data.demonstrations import is_demonstration, tokenised

    if not any(map(is_demonstration, episodes.trajectories)):
        return episodes
    from openhands_rl_plugin.training.verifier.prompt import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    if not tokenizer.chat_template:
        raise TrainingError(f"{model}: its tokenizer has no chat template; put the model's chat_template.jinja there")
    found = tokenised(episodes.trajectories, tokenizer)
    if found.made:
        print(f"{found.made} episodes came without token ids: tokenised here, with the chat template of {model}")
    for what, count in found.unsaid.most_common():
        print(f"  its template prints no {what}: left out of {count} answers")
    for why, count in found.failed.most_common(5):
        print(f"  {count} cannot be tokenised: {why}")
    return replace(episodes, trajectories=found.trajectories)
