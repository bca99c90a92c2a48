"""The reward of ``openhands-rl train``: that of ``[rl.reward]``, or the one that options name."""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options.stored import json_object
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.protocols import Reward


def add_reward(parser: argparse.ArgumentParser) -> None:
    """``--reward`` and ``--reward-options``."""
    parser.add_argument(
        "--reward", metavar="NAME", help="return, success, verifier, ..., or module:Class (default: [rl.reward])"
    )
    parser.add_argument("--reward-options", type=json_object, metavar="JSON", help="the reward's options, an object")


def reward_of(args: argparse.Namespace, settings: RewardSettings) -> Reward:
    """The reward itself. Raises ``ConfigError`` for an unknown one, and for options that it does not know."""
    return make_reward(settings.overridden(args.reward, args.reward_options))
