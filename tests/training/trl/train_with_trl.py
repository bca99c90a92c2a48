"""Trains by TRL as one of several processes: train_with_trl.py MODEL OUT SETTINGS. Each leaves OUT/RANK."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from made_samples import make_samples

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.training.distributed.ranks import join_ranks
from openhands_rl_plugin.training.trl.trainer import TRLTrainer

if __name__ == "__main__":
    model, out, given = sys.argv[1:]
    with join_ranks() as ranks:
        trainer = TRLTrainer(Path(model), TrainingSettings.model_validate_json(given), "tiny")
        trainer.reinforce(make_samples(7))
        trainer.save_adapter(Path(out) / str(ranks.rank))
