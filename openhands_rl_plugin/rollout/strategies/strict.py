"""What the options of a search are made of."""

from __future__ import annotations

from pydantic import ConfigDict

from openhands_rl_plugin.core.types import Frozen


class StrictOptions(Frozen):
    """Options as a configuration file gives them, with types of its own: no truth or text for a number, and numbers
    that are finite, because a search computes with them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
