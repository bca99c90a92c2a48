"""Language models: clients (``engines``), generation here (``generator``), our server, adapters, the recording gateway.

Importing this package loads no torch.
"""

from openhands_rl_plugin.models.generator.threads import prepare_threads

# Here, because it must come before torch's first import, and all modules that import torch are below this one.
prepare_threads()
