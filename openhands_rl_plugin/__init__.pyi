from openhands_rl_plugin.apps.chat_endpoint import AgentRuntime as AgentRuntime
from openhands_rl_plugin.apps.demo_model import ensure_model
from openhands_rl_plugin.apps.rl_agent import RLAgent as RLAgent
from openhands_rl_plugin.apps.rollout.play import play as play
from openhands_rl_plugin.config.rl import RLSettings as RLSettings
from openhands_rl_plugin.config.rollout import PlayOptions as PlayOptions
from openhands_rl_plugin.config.toml import load_settings as load_settings
from openhands_rl_plugin.core.errors import ConfigError as ConfigError
from openhands_rl_plugin.core.errors import RLError as RLError
from openhands_rl_plugin.core.records import TrajectoryFilter as TrajectoryFilter
from openhands_rl_plugin.core.templates import template_for
from openhands_rl_plugin.core.tree import EpisodeTree as EpisodeTree
from openhands_rl_plugin.core.types import EpisodeRequest as EpisodeRequest
from openhands_rl_plugin.core.types import Frozen as Frozen
from openhands_rl_plugin.core.types import Limits as Limits
from openhands_rl_plugin.core.types import Message as Message
from openhands_rl_plugin.core.types import Observation as Observation
from openhands_rl_plugin.core.types import PolicyRef as PolicyRef
from openhands_rl_plugin.core.types import SamplingParams as SamplingParams
from openhands_rl_plugin.core.types import Score as Score
from openhands_rl_plugin.core.types import Task as Task
from openhands_rl_plugin.core.types import Trajectory as Trajectory
from openhands_rl_plugin.environments.http.client import BaseEnvClient as BaseEnvClient
from openhands_rl_plugin.environments.http.client import WebEnvClient as WebEnvClient
from openhands_rl_plugin.environments.tools.environment import ToolBase as ToolBase
from openhands_rl_plugin.environments.tools.environment import ToolEnvironment as ToolEnvironment
from openhands_rl_plugin.models.adapters.store import AdapterStore as AdapterStore
from openhands_rl_plugin.models.engines.client import OpenAIEngine as OpenAIEngine
from openhands_rl_plugin.rollout.episode import AgentSession as AgentSession
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy as StandardReActStrategy
from openhands_rl_plugin.rollout.strategies.base import ToTStrategy as ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy as MCTSStrategy
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage as MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage as FileTrajectoryStorage

RLAgentConfig = RLSettings
demo_model = ensure_model
make_template = template_for

__version__: str
__all__: list[str]
