"""Converts turns with TRL's ``_chain_to_sequences``, run by a Python that has trl; nothing of this project is imported.

    PYTHON evaluation/performance/formats/conversion_peer.py FILE

``FILE`` holds trajectories as JSON: lists of turns, each the tokens since the last turn, those sampled and their
logprobs. For every line on standard input all of them are converted, and one line of JSON is printed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from trl.experimental.async_grpo.async_rollout_worker import (  # pyright: ignore[reportMissingImports]
    TurnRecord,
    _chain_to_sequences,
)

FORK_THRESHOLD = 1024


def main() -> None:
    chains = []
    for turns in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        held: list[int] = []
        chain = []
        for delta, sampled, logprobs in turns:
            prompt = held + delta
            chain.append(TurnRecord(prompt, sampled, logprobs))
            held = prompt + sampled
        chains.append(chain)
    for _ in sys.stdin:
        gc.collect()
        started = time.perf_counter()
        made = [_chain_to_sequences(chain, str(number), FORK_THRESHOLD)[0] for number, chain in enumerate(chains)]
        seconds = time.perf_counter() - started
        sequences = [[len(s.input_ids), sum(s.completion_mask), sum(s.input_ids)] for each in made for s in each]
        print(json.dumps({"seconds": seconds, "sequences": sequences}), flush=True)


if __name__ == "__main__":
    main()
