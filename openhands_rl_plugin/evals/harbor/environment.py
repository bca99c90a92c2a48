"""A Harbor task as an environment: the model's actions are commands in the task's shell, the tests pay the reward."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task
from openhands_rl_plugin.environments.http.opening import opening_messages
from openhands_rl_plugin.environments.http.react import parse_plain, parse_react
from openhands_rl_plugin.environments.workspace.copies import ForkLimits, copy_tree, remove_tree
from openhands_rl_plugin.environments.workspace.shell import CommandResult
from openhands_rl_plugin.evals.harbor.container import HarborContainer
from openhands_rl_plugin.evals.harbor.tasks import HarborTask, find_task, find_tasks, read_task
from openhands_rl_plugin.evals.harbor.verification import judge

SUBMIT = "submit"
_ACTIONS = (
    "<command> - run a bash command; the shell keeps its directory and variables; a command may have several lines\n"
    f"{SUBMIT} - end the task: then your work is tested"
)


class HarborOptions(Frozen):
    """``tasks``: a folder of task folders. ``command_timeout`` is in seconds. ``network``: commands and tests may use
    it. ``force``: also play tasks that need what is not here (a container's packages), as far as that goes.

    ``reward_key``: the reward that is paid where the tests write several. ``max_turns``: the episode's last turn, after
    which the work is tested as it stands (default: that of ``[rl]``). ``cache``: a folder for Python environments.

    ``pass_env``: variables of this process's environment that tasks may ask for (``${NAME}`` in ``task.toml``).
    """

    tasks: str = ""
    command_timeout: float = Field(default=120.0, gt=0)
    network: bool = False
    force: bool = False
    reward_key: str = "reward"
    react_format: bool = True
    system_prompt: str | None = None
    max_turns: int = Field(default=0, ge=0)
    cache: str = ""
    pass_env: tuple[str, ...] = ()


class HarborEnvironment:
    """One episode of one task, as a ``protocols.Environment`` that can be forked while no process runs.

    A task's number is that of the folder, by name; ``data["row"]["task"]`` or ``env_name = "harbor/NAME"`` names one
    (by its path below ``tasks`` where several have the name).
    Every episode has a place of its own in the folder for temporary files. The last step pays the tests' reward.
    """

    Options: ClassVar[type[HarborOptions]] = HarborOptions

    def __init__(self, options: HarborOptions | None = None) -> None:
        self.options = options or HarborOptions()
        self._container: HarborContainer | None = None
        self._place: Path | None = None
        self._idx: object = None
        self._rewards: list[float] = []
        self._malformed = 0
        self._last = ""
        self._verified: JsonObject | None = None
        self._ended = self._truncated = self._closed = False

    async def reset(self, task: Task) -> Observation:
        """Build the container. Raises ``BadEnvironmentError`` for a task that needs what is not here."""
        if self._container is not None or self._closed:
            raise RuntimeError("an environment runs one episode: make a new one")
        chosen = await asyncio.to_thread(self._task_of, task)
        if chosen.missing and not self.options.force:
            raise BadEnvironmentError(
                f"{chosen.name} cannot run here without its container: it needs {', '.join(chosen.missing)}; leave it "
                "out, or set force = true in [rl.environment]"
            )
        self._idx = task.data.get("idx")
        self._place = Path(tempfile.mkdtemp(prefix="rl-harbor-"))
        cache = Path(self.options.cache).expanduser() if self.options.cache else None
        self._container = HarborContainer(
            chosen, self._place, network=self.options.network, cache=cache, pass_env=self.options.pass_env
        )
        await self._blocking(self._container.build)
        instructed = task.model_copy(update={"instruction": chosen.instruction})
        options = self.options
        messages = opening_messages(
            instructed,
            f"You are in {chosen.workdir}.",
            react_format=options.react_format,
            actions=_ACTIONS,
            system_prompt=options.system_prompt,
        )
        return Observation(messages=messages)

    async def step(self, action: Message) -> Observation:
        """Run one command, or the tests."""
        if self._container is None or self._ended:
            raise RuntimeError("no episode is open")
        options = self.options
        parsed = parse_react(action.content) if options.react_format else parse_plain(action.content)
        command = parsed.action
        if command is None:
            self._malformed += 1
            self._last = parsed.error or "Invalid action."
        elif command.strip() != SUBMIT:
            shell = self._container.shell
            result = await self._blocking(lambda: shell.run(command, timeout=options.command_timeout))
            if self._ended:
                raise InfrastructureError(f"{self._container.task.name}: a time limit ended the command")
            self._last = _told(result, options.command_timeout)
        submitted = command is not None and command.strip() == SUBMIT
        last_turn = options.max_turns and len(self._rewards) + 1 >= options.max_turns
        reward = 0.0
        if submitted or last_turn:
            reward = await self._test()
            self._ended, self._truncated = True, not submitted
            self._last = f"{self._last}\n\n" * (not submitted) + f"The tests gave the reward {reward:g}."
        self._rewards.append(reward)
        said = Message(role="user", content=self._last)
        return Observation(messages=(said,), reward=reward, terminated=submitted, truncated=self._truncated)

    async def fork(self) -> Self:
        """A copy of the files, with a shell in the same state. Raises ``BadEnvironmentError`` while processes run."""
        if self._container is None or self._ended:
            raise RuntimeError("only an open episode can be forked")
        twin = type(self)(self.options)
        twin._place = Path(tempfile.mkdtemp(prefix="rl-harbor-"))
        try:
            twin._container = await self._blocking(lambda: _copied(self._container, twin._place))
        except BaseException:
            await twin.close()
            raise
        twin._idx, twin._rewards, twin._malformed, twin._last = self._idx, [*self._rewards], self._malformed, self._last
        return twin

    async def cut_short(self) -> Observation | None:
        """Test the work as it stands, where a limit ended the episode; the reward is the last command's."""
        if self._container is None or self._ended or not self._rewards:
            return None
        reward = self._rewards[-1] = await self._test()
        self._ended = self._truncated = True
        return Observation(reward=reward, truncated=True)

    async def pay_interrupted(self) -> Observation | None:
        """Test what an interrupted command has left, as Harbor does when the agent's time is up; it is paid to that."""
        if self._container is None or self._ended:
            return None
        self._ended = self._truncated = True
        # A host ends an episode without cancelling its step, whose command would go on until its own limit.
        await asyncio.to_thread(self._container.interrupt)
        self._rewards.append(reward := await self._test())
        return Observation(reward=reward, truncated=True)

    async def evidence(self) -> JsonObject:
        """Return, rewards, and what the tests said.

        An episode that was cut before its end is tested now. Raises ``BadEnvironmentError`` where that gives a reward
        which no step can pay any more: it would count as 0.
        """
        if self._container is None:
            return {}
        if self._verified is None:
            reward = await self._test()
            if reward:
                raise BadEnvironmentError(
                    f"{self._container.task.name}: the episode was cut before its end, and its work earns {reward:g}: "
                    f"raise max_prompt_length or the time limit, or have the model {SUBMIT}"
                )
        rewards = [*self._rewards]
        return {
            "idx": self._idx if isinstance(self._idx, int) else None,
            "task": self._container.task.name,
            "final_state": self._last,
            "return": sum(rewards),
            "rewards": [*rewards],
            "steps": len(rewards),
            "malformed": self._malformed,
            "done": self._ended,
            "truncated": self._truncated,
            "verifier": self._verified,
            "without_container": [*self._container.task.missing],
        }

    async def close(self) -> None:
        """End all processes and remove the files."""
        if self._closed:
            return
        self._closed = True
        if self._container is not None:
            await asyncio.to_thread(self._container.close)
        if self._place is not None:
            await asyncio.to_thread(remove_tree, self._place)

    async def _test(self) -> float:
        container = self._container
        assert container is not None
        reward, self._verified = await self._blocking(lambda: judge(container, self.options.reward_key))
        return reward

    async def _blocking[T](self, call: Callable[[], T]) -> T:
        """Run ``call`` in a thread; a cancellation ends the container's processes, so that the thread ends too."""
        try:
            return await asyncio.to_thread(call)
        except asyncio.CancelledError:
            if self._container is not None:
                self._container.interrupt()
            raise

    def _task_of(self, task: Task) -> HarborTask:
        if not self.options.tasks:
            raise ConfigError('harbor needs the folder of its tasks: tasks = "FOLDER" in [rl.environment]')
        where = Path(self.options.tasks).expanduser()
        row = task.data.get("row")
        name = row.get("task") if isinstance(row, dict) else None
        name = name or task.environment.partition("/")[2]
        if name:
            return read_task(find_task(where, str(name)))
        folders = find_tasks(where)
        index = task.data.get("idx")
        if not isinstance(index, int) or not 0 <= index < len(folders):
            raise BadEnvironmentError(f"{self.options.tasks} holds the tasks 0 to {len(folders) - 1}, and no {index!r}")
        return read_task(folders[index])


def _told(result: CommandResult, timeout: float) -> str:
    parts = [result.earlier.strip("\n"), result.output.strip("\n")]
    if result.timed_out:
        parts.append(f"[ended after {timeout:g} s]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in parts if part) or "(no output)"


def _copied(container: HarborContainer | None, place: Path | None) -> HarborContainer:
    assert container is not None and place is not None
    if running := [name for name in container.shell.snapshot().processes if name]:
        raise BadEnvironmentError(f"{container.task.name} cannot be forked while {', '.join(running)} runs")
    for part in ("root", "given"):
        copy_tree(container.place / part, place / part, limits=ForkLimits(), stop=threading.Event())
    return container.twin(place)
