"""A resources server of the nemo-gym package, run by a Python that has it: ``serve_nemo_gym.py PORT MODULE:CLASS``.

The package's own launcher starts Ray as well, which no request needs.
"""

import importlib
import sys

import uvicorn
from nemo_gym.server_utils import ServerClient

port, (module, _, name) = int(sys.argv[1]), sys.argv[2].partition(":")
server_class = getattr(importlib.import_module(module), name)
config = server_class.model_fields["config"].annotation(host="127.0.0.1", port=port, entrypoint="app.py", name="game")
server = server_class(config=config, server_client=ServerClient.model_construct())
app = server.setup_webserver()
server.setup_liveness(app)
server.setup_exception_middleware(app)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
