"""What would talk, or ask somebody on the network, while a run draws its bars."""

from __future__ import annotations

import os
import warnings


def quieten() -> None:
    """OpenHands' LLM library fetches a price list at import, transformers asks a hub and draws bars of its own."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
