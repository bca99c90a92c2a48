"""OpenHands V1 (``openhands-sdk`` 1.15 and newer), whose agents run in conversations.

Importing the package registers ``RLAgent``, its tools and the rewards as critics:
``agent-server --import-modules openhands_rl_plugin.hosts.v1``.
"""

from openhands_rl_plugin.config.host import need_sdk

need_sdk()

from openhands_rl_plugin.hosts.shared import litellm_calls as litellm_calls  # noqa: E402
from openhands_rl_plugin.hosts.v1 import workspace as workspace  # noqa: E402
from openhands_rl_plugin.hosts.v1.agent import RLAgent as RLAgent  # noqa: E402
from openhands_rl_plugin.hosts.v1.critic import RewardCritic as RewardCritic  # noqa: E402
