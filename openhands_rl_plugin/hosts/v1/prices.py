"""What the SDK is told of the price of a model that nobody sells."""

from __future__ import annotations


def price_of(model: str) -> float | None:
    """The price of a token, in USD: 0 for a model that is not in litellm's list, else ``None``, which takes that one.

    Otherwise the SDK asks litellm for the price of each answer, and warns each time that there is none.
    """
    from litellm import model_cost

    if model in model_cost or model.partition("/")[2] in model_cost:
        return None
    return 0.0
