"""``python -m openhands_rl_plugin.cli``: the same as ``openhands-rl``."""

import sys

from openhands_rl_plugin.cli import program

sys.exit(program())
