"""Is version B better than version A? Both play the same held-out tasks, and the difference gets an interval.

    python evaluate_two_adapters.py MODEL ADAPTERS A B     directories, and two versions: 1 2, or base 1

The tasks are a grid to walk through; put your own environment into SETTINGS.
"""

from __future__ import annotations

import sys
import tempfile

import httpx

from openhands_rl_plugin import AdapterStore, RLAgent, RLAgentConfig
from openhands_rl_plugin.core.statistics import paired_difference, wilson
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server

SETTINGS = {"env_name": "openhands_rl_plugin.testing:GridEnvironment", "max_turns": 6, "max_response_length": 8}
TASKS, ATTEMPTS = range(10), 4


def success(url: str, served_name: str, folder: str) -> list[float]:
    """The share of solved attempts of each task."""
    config = RLAgentConfig.model_validate(
        {
            **SETTINGS,
            "react_format": False,
            "storage": {"path": f"{folder}/{served_name}"},
            "serving": {"base_url": f"{url}/v1", "model": served_name, "adapters_path": f"{folder}/none"},
        }
    )
    with RLAgent(f"{url}/v1", config=config) as agent:
        episodes = agent.run(task_indices=TASKS, batch_size=ATTEMPTS, split="heldout")
    solved = [float((episode["reward"] or 0.0) >= 1.0) for episode in episodes]
    return [sum(solved[at : at + ATTEMPTS]) / ATTEMPTS for at in range(0, len(solved), ATTEMPTS)]


def main(model: str, adapters: str, first: str, second: str) -> None:
    """Serve the model with both versions, play, compare."""
    store = AdapterStore(adapters)
    names = ["model" if version == "base" else f"policy-v{int(version):06d}" for version in (first, second)]
    config = ServerConfig(model=model, served_model_name="model", port=0)
    with running_server(config) as url, tempfile.TemporaryDirectory() as folder:
        for version in store.versions("policy"):
            if version.name in names:
                body = {"lora_name": version.name, "lora_path": version.path}
                httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()
        before, after = (success(url, name, folder) for name in names)
    for name, found in zip(names, (before, after), strict=True):
        rate = wilson(round(sum(found) * ATTEMPTS), len(found) * ATTEMPTS)
        print(f"{name}: {rate.mean:.2f} ({rate.low:.2f} to {rate.high:.2f})")
    change = paired_difference(before, after)
    print(f"difference: {change.mean:+.2f} ({change.low:+.2f} to {change.high:+.2f}, 95 %, bootstrap over tasks)")


if __name__ == "__main__":
    main(*sys.argv[1:5])
