"""How many of the sampled tokens of an episode are trained when OpenHands' condenser summarises its history.

    python -m evaluation.performance.training.condensed [--turns 12] [--max-size 10]

A session of OpenHands' real controller with its ``LLMSummarizingCondenser``; a server answers from a script, with token
ids that are a prefix of the next prompt's as long as nothing is rewritten.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import NamedTuple

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.types import CONDENSATION, TURN, EpisodeRequest, Limits, Node, Task, Trajectory, kind_of
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.training.data.batch import samples_of
from openhands_rl_plugin.training.data.dataset import Episodes, ExcludedEpisodes, build_dataset


class Share(NamedTuple):
    """Sampled tokens: of all turns, those that are trained, and those of the last segment alone; and of summaries."""

    turns: int
    segments: int
    sampled: int
    trained: int
    last_segment: int
    of_summaries: int


async def condensed_episode(turns: int, max_size: int) -> Trajectory:
    """One episode of so many turns. The history is condensed when it has more than ``max_size`` events."""
    replies = [{"bash": f"echo turn {at}; seq {at} {3 * at}"} for at in range(turns + 1)]
    with instant_model() as url:
        serving = {"base_url": url, "model": "policy"}
        settings = RLSettings.model_validate({"serving": serving, "workspace": {"isolation": "none"}, "host": "v0"})
        condenser = {"type": "llm", "max_size": max_size, "keep_first": 3}
        options = HostOptions(environment_mode=False, condenser=condenser)
        task = Task(
            id="condensed", environment="workspace", instruction=script(replies), limits=Limits(max_turns=turns)
        )
        async with open_runner(settings, options) as runner:
            return await runner.run(EpisodeRequest(task=task, run_id="figure", group_id="figure"))


def share_of(trajectory: Trajectory) -> Share:
    """What of the episode ``algorithm = "sft"`` trains; reinforcement learning trains the same tokens."""
    episodes = Episodes((trajectory,), (1.0,), ExcludedEpisodes())
    samples = build_dataset(episodes, TrainingSettings(algorithm="sft")).samples
    answers = [node for node in trajectory.nodes if node.sampled]
    return Share(
        turns=sum(kind_of(node) == TURN for node in answers),
        segments=len(samples),
        sampled=sum(_sampled(node) for node in answers if kind_of(node) == TURN),
        trained=sum(sum(sample.mask) for sample in samples),
        last_segment=sum(sum(sample.mask) for sample in samples_of(trajectory, leaf=trajectory.head)),
        of_summaries=sum(_sampled(node) for node in answers if kind_of(node) == CONDENSATION),
    )


def _sampled(node: Node) -> int:
    return len(node.tokens.sampled_ids) if node.tokens is not None else 0


def main() -> None:
    """Play, and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="turns of the episode")
    parser.add_argument("--max-size", type=int, default=10, help="events before the history is condensed")
    args = parser.parse_args()
    share = share_of(asyncio.run(condensed_episode(args.turns, args.max_size)))
    print(f"{share.turns} turns in {share.segments} segments, {share.of_summaries} tokens of summaries beside them")
    part = share.trained / share.sampled
    print(f"{share.trained} of {share.sampled} sampled tokens trained ({part:.1%}); last segment: {share.last_segment}")


if __name__ == "__main__":
    main()
