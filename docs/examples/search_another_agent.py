"""Search for somebody else's agent, in forks of its workspace: mini-swe-agent by MCTS, judged by a command.

    python search_another_agent.py BASE_URL MODEL FOLDER TASK COMMAND

``MiniBranch`` is all that a search needs of an agent: a copy of it in the middle of its work, which runs on.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

from litellm import ModelResponse
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import InterruptAgentFlow
from minisweagent.models.litellm_model import BASH_TOOL, LitellmModel

from openhands_rl_plugin import FileTrajectoryStorage, Task
from openhands_rl_plugin.config.build import make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import EpisodeRequest, StopReason
from openhands_rl_plugin.session.branches import BranchWorld, Complete
from openhands_rl_plugin.session.session import EpisodeOver, Session
from openhands_rl_plugin.session.upstream import ALL_FIELDS, HttpUpstream

TEMPLATES = {"system_template": "You can use bash.", "instance_template": "{{task}}"}


class Model(LitellmModel):
    """mini-swe-agent's model, which a session answers."""

    abort_exceptions: ClassVar = [*LitellmModel.abort_exceptions, EpisodeOver]

    def __init__(self, name: str, complete: Complete) -> None:
        super().__init__(model_name=name, cost_tracking="ignore_errors")
        self._complete = complete

    def _query(self, messages: list[dict[str, str]], **kwargs: Any) -> ModelResponse:
        body = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL], **kwargs}
        return ModelResponse(**self._complete(body))

    def _calculate_cost(self, response: ModelResponse) -> dict[str, float]:
        return {"cost": 0.0}


class MiniBranch:
    """A ``session.branches.Branch``: the agent in ``folder`` where it is ``live``, else in a copy of it."""

    def __init__(self, agent: DefaultAgent, folder: Path, *, live: bool = False) -> None:
        self.stop = threading.Event()
        self.folder = folder if live else Path(tempfile.mkdtemp()) / "copy"
        if not live:
            shutil.copytree(folder, self.folder)
        self.agent = agent if live else DefaultAgent(agent.model, None, **agent.config.model_dump())
        self.agent.env = LocalEnvironment(cwd=str(self.folder))
        self.agent.messages = copy.deepcopy(agent.messages)

    def run(self, complete: Complete) -> None:
        self.agent.model = Model(self.agent.model.config.model_name, complete)
        while self.agent.messages[-1]["role"] != "exit":
            try:
                self.agent.step()
            except InterruptAgentFlow as flow:
                self.agent.add_messages(*flow.messages)

    def fork(self) -> MiniBranch:
        return MiniBranch(self.agent, self.folder)

    def seconds(self, answer: Any) -> float:
        return 60.0

    def evidence(self) -> dict[str, Any]:
        return {}

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        ran = subprocess.run(asked.command, shell=True, cwd=self.folder, capture_output=True, text=True, timeout=60)
        return CommandEvidence(command=asked.command, exit_code=ran.returncode, output=ran.stdout[-2000:])

    def close(self) -> None:
        shutil.rmtree(self.folder.parent)


def main(base_url: str, model: str, folder: Path, task: str, command: str) -> None:
    """Search, and store the episode in ``./searched``."""
    judge = {"reward": "command", "reward_options": {"command": command}}
    options = {"num_simulations": 16, "first_branches": 6, "num_branches": 2, "depth": 3}
    settings = RLSettings(
        rollout_strategy="MCTS", strategy={**options, "value": "reward", "value_options": judge}, max_turns=20
    )
    request = EpisodeRequest(
        task=Task(id="task", environment="workspace", instruction=task), run_id="mini", group_id="1"
    )
    strategy, spec = make_strategy(settings), strategy_spec(settings)
    session = Session(
        request, settings, strategy=strategy, strategy_spec=spec, base_model=model, environment_mode=False
    )
    session.connect(HttpUpstream(base_url, None, 600.0, fields=ALL_FIELDS))

    loop = background()
    storage = FileTrajectoryStorage("searched")
    session.keep_in(storage, loop.loop)
    live_model = Model(model, session.answer)
    live = MiniBranch(DefaultAgent(live_model, None, **TEMPLATES), folder, live=True)
    session.world = lambda: BranchWorld(live, session)
    live.agent.run(task)

    session.end_here(StopReason.TERMINATED)
    judged = live.check(WorkspaceCommand(command=command))
    trajectory = session.freeze(evidence={"command": judged.model_dump(mode="json")})
    loop.wait_for(session.end(trajectory))
    loop.wait_for(storage.close())
    simulated = sum(node.simulated for node in trajectory.nodes)
    print(f"{trajectory.usage.calls} completions, {simulated} simulated nodes, exit code {judged.exit_code}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4], sys.argv[5])
