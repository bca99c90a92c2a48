from .agent import RLAgent as RLAgent
from .config import load_settings as load_settings
from .environments.http import WebEnvClient as WebEnvClient
from .environments.tools import ToolBase as ToolBase
from .environments.tools import ToolEnvironment as ToolEnvironment
from .errors import ConfigError as ConfigError
from .errors import RLError as RLError
from .records import TrajectoryFilter as TrajectoryFilter
from .runtime.agent import AgentRuntime as AgentRuntime
from .session import AgentSession as AgentSession
from .settings import RLSettings as RLSettings
from .storages.file import FileTrajectoryStorage as FileTrajectoryStorage
from .storages.mongodb import MongoDBTrajectoryStorage as MongoDBTrajectoryStorage
from .strategies.react import StandardReActStrategy as StandardReActStrategy
from .templates.families import template_for as make_template  # noqa: F401
from .tree import EpisodeTree as EpisodeTree
from .types import EpisodeRequest as EpisodeRequest
from .types import Limits as Limits
from .types import Message as Message
from .types import Observation as Observation
from .types import SamplingParams as SamplingParams
from .types import Score as Score
from .types import Task as Task
from .types import Trajectory as Trajectory

RLAgentConfig = RLSettings

__version__: str
__all__: list[str]
