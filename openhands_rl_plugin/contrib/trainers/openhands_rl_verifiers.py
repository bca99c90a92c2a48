"""OpenHands in verifiers 0.4 and prime-rl: ``vf-eval openhands-rl-verifiers``.

Installed as a module of its own, because verifiers finds top-level modules only.
"""

from openhands_rl_plugin.contrib.trainers.verifiers import OpenHandsEnv, OpenHandsHarness, OpenHandsTaskset

__all__ = ["OpenHandsEnv", "OpenHandsHarness", "OpenHandsTaskset"]
