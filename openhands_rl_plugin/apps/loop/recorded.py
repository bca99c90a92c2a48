"""A model server whose answers cannot be trained on is refused at the first episode, not after an iteration of them."""

from __future__ import annotations

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.trajectories.view.figures import causes_of


class RecordedRunner:
    """An ``EpisodeRunner`` over another, until one of whose episodes has token ids and logprobs none may lack them.

    Answers that lost theirs with a secret do not count: the server sent them. ``server``: its address, for the message.
    ``logprobs``: whether they are needed, which imitation does without.
    """

    def __init__(self, runner: EpisodeRunner, server: str, *, logprobs: bool = True) -> None:
        self._runner = runner
        self._server = server
        self._logprobs = logprobs
        self._proven = False

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode. Raises ``ConfigError`` where all of its answers came without what training needs."""
        trajectory = await self._runner.run(request)
        if not self._proven:
            self._look(trajectory)
        return trajectory

    async def close(self) -> None:
        """Close the wrapped runner."""
        await self._runner.close()

    def _look(self, trajectory: Trajectory) -> None:
        own = [*trajectory.sampled()]
        if any(node.tokens is not None and (node.tokens.logprobs or not self._logprobs) for node in own):
            self._proven = True
            return
        causes = [[*causes_of(node.metadata)] for node in own]
        if causes and all(causes):
            raise ConfigError(
                f"nothing can be learnt from what {self._server} answers: {'; '.join(causes[0])}; serve the model with "
                "`openhands-rl serve`, or vLLM 0.10.2 or newer and no proxy in between that drops these fields, then "
                "start the same command again"
            )
