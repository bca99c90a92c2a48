"""Being here puts this folder on the import path, for the helpers that several test folders share."""

import os

from hypothesis import HealthCheck, settings

# Nothing is fetched: no model hub, and not the price list that OpenHands' LLM library asks for at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# Shared machines are slow at times; what a test may take is bounded by pytest's timeout.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
