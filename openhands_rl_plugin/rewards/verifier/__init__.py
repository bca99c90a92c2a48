"""A trained model that says how likely an episode solved its task, as a reward. Start with ``reward``."""
