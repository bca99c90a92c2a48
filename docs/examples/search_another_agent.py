"""Search for somebody else's agent, in forks of its workspace: mini-swe-agent by MCTS, judged by a command.

    python search_another_agent.py BASE_URL MODEL FOLDER TASK COMMAND

``MiniBranch`` is all that a search needs of an agent: a copy of it in the middle of its work, which runs on. Commands
run in bubblewrap, at ``/workspace``.
"""

from __future__ import annotations

import copy
import sys
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
from openhands_rl_plugin.core.records import WorkspaceCommand
from openhands_rl_plugin.core.types import EpisodeRequest, StopReason
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.models.engines.client import HttpUpstream
from openhands_rl_plugin.rollout.episode import on_its_loop
from openhands_rl_plugin.session.session import BranchWorld, Complete, EpisodeOver, Session

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


class Sandbox(LocalEnvironment):
    """mini-swe-agent's environment, in a workspace that can be forked."""

    def __init__(self, workspace: SandboxedWorkspace) -> None:
        super().__init__()
        self.workspace = workspace

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        ran = self.workspace.run(action["command"], timeout=timeout or self.workspace.seconds)
        code = -1 if ran.exit_code is None else ran.exit_code
        output = {"output": ran.output, "returncode": code, "exception_info": "timed out" if ran.timed_out else ""}
        self._check_finished(output)
        return output


class MiniBranch:
    """A ``session.session.Branch``: the agent, or a copy of it, in ``workspace``."""

    def __init__(self, agent: DefaultAgent, workspace: SandboxedWorkspace) -> None:
        self.agent, self.workspace = agent, workspace
        agent.env = Sandbox(workspace)

    def run(self, complete: Complete) -> None:
        self.agent.model = Model(self.agent.model.config.model_name, complete)
        while self.agent.messages[-1]["role"] != "exit":
            try:
                self.agent.step()
            except InterruptAgentFlow as flow:
                self.agent.add_messages(*flow.messages)

    def fork(self) -> MiniBranch:
        twin = DefaultAgent(self.agent.model, None, **self.agent.config.model_dump())
        twin.messages = copy.deepcopy(self.agent.messages)
        return MiniBranch(twin, self.workspace.fork())


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
    session.upstream = HttpUpstream(base_url, None, 600.0)

    loop = background()
    storage = FileTrajectoryStorage("searched")
    session.store_in(on_its_loop(storage, loop.loop))
    live_model = Model(model, session.answer)
    workspace = SandboxedWorkspace(folder, settings.workspace)
    live = MiniBranch(DefaultAgent(live_model, None, **TEMPLATES), workspace)
    session.world = lambda: BranchWorld(live, session)
    live.agent.run(task)

    session.end_here(StopReason.TERMINATED)
    judged = workspace.check(WorkspaceCommand(command=command))
    workspace.close()
    trajectory = session.freeze(evidence={"command": judged.model_dump(mode="json")})
    loop.wait_for(session.end(trajectory))
    loop.wait_for(storage.close())
    simulated = sum(node.simulated for node in trajectory.nodes)
    print(f"{trajectory.usage.calls} completions, {simulated} simulated nodes, exit code {judged.exit_code}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4], sys.argv[5])
