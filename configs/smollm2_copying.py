"""The copy term of a trained drafter alone, on answers that the drafter has not seen.

    python -m train.main --config=configs/smollm2_copying.py --workdir=runs/copying \\
        --config.init_from=runs/further --config.data.tokens=runs/unseen.npz

On text that the drafter was trained on it would learn that the drafter needs no help. 592 numbers are trained.
"""

from configs import smollm2


def get_config():
    config = smollm2.get_config()
    config.steps = 200
    config.drafter.transition = "joint"
    config.drafter.block_length = 7
    config.drafter.copy_length = 16
    config.drafter.trained = ("copying",)
    config.drafter.confidence = False
    config.loss.confidence = 0.0
    config.data.source_weights = {}
    config.evaluation.prompts = 0
    config.evaluation.blocks_every = 0
    config.optimizer.lr = 0.05
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.0
    return config
