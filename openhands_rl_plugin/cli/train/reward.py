"""The reward of ``openhands-rl train``: that of ``[rl.reward]``, or the one that options name."""

from __future__ import annotations

import argparse
import json

from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.types import JsonObject


def add_reward(parser: argparse.ArgumentParser) -> None:
    """``--reward`` and ``--reward-options``."""
    parser.add_argument(
        "--reward", metavar="NAME", help="return, success, verifier, ..., or module:Class (default: [rl.reward])"
    )
    parser.add_argument("--reward-options", type=json_options, metavar="JSON", help="the reward's options, an object")


def reward_of(args: argparse.Namespace, settings: RewardSettings) -> Reward:
    """The reward itself. Raises ``ConfigError`` for an unknown one, and for options that it does not know."""
    return make_reward(settings.overridden(args.reward, args.reward_options))


def json_options(text: str) -> JsonObject:
    """The options of a plugin on the command line."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"threshold": 0.5}')
    return found
