"""A trained verifier (outcome reward model) as a reward: P(success) of an episode. Start with ``reward``."""
