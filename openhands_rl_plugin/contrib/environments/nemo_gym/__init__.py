"""NeMo Gym's resources servers. Start with ``client``; ``rows`` reads what a data set's row brings along."""

from openhands_rl_plugin.contrib.environments.nemo_gym.client import NeMoGymClient, NeMoGymOptions

__all__ = ["NeMoGymClient", "NeMoGymOptions"]
