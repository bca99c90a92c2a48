"""What the SDK is told of the price of a model that nobody sells."""

from __future__ import annotations

from openhands_rl_plugin.core.types import JsonObject


def prices_of(model: str) -> JsonObject:
    """Fields of an LLM: no price for a model that is not in litellm's list.

    Otherwise the SDK asks litellm for the price of each answer, and warns each time that there is none.
    """
    from litellm import model_cost

    if model in model_cost or model.partition("/")[2] in model_cost:
        return {}
    return {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
