"""OpenEnv's own client with scripted actions: what it says that each step is worth.

PYTHON own_openenv.py '{"url": URL, "actions": [{...}, ...]}'     # prints a JSON list
"""

import json
import sys

from openenv.core.generic_client import GenericEnvClient

job = json.loads(sys.argv[1])
with GenericEnvClient(base_url=job["url"]).sync() as client:
    client.reset()
    steps = [client.step(action) for action in job["actions"]]
print(json.dumps([[step.reward, step.done] for step in steps]))
