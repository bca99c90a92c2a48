"""``python -m openhands_rl_plugin.training.launched``: one of the processes that train together, see ``worker``."""

from __future__ import annotations

import sys

from openhands_rl_plugin.core.machine import without_collection

if __name__ == "__main__":
    with without_collection():
        from openhands_rl_plugin.training.launched.worker import main
    sys.exit(main())
