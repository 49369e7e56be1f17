"""The confidence head of a trained drafter alone, on answers that the drafter has not seen.

    python -m train.main --config=configs/smollm2_confidence.py --workdir=runs/confidence \\
        --config.init_from=runs/copying --config.data.tokens=runs/unseen.npz

A head that learns together with its drafter learns from text that the drafter has come to know, and promises too much.
`train.calibrate` can then only make all its promises smaller. The answers come from `train.regenerate`.
"""

from configs import smollm2


def get_config():
    config = smollm2.get_config()
    config.steps = 300
    config.drafter.transition = "joint"
    config.drafter.block_length = 7
    config.drafter.copy_length = 16
    config.drafter.trained = ("confidence",)
    config.drafter.confidence_with_law = True
    config.loss.ce = config.loss.l1 = 0.0
    config.loss.confidence = 1.0
    config.loss.decay = 2.0  # the first promises decide most lengths
    # It speaks of temperature 1. Few of the shipped answers are to word problems. Weights of 0 would make another set of
    # conversations, which could not share its features with configs/smollm2_copying.py.
    config.data.source_weights = {
        "gsm8k": 4.0, "code": 2.0, "gsm8k_greedy": 0.01, "code_greedy": 0.01, "chat_greedy": 0.01}
    config.evaluation.prompts = 0
    config.evaluation.blocks_every = 0
    config.optimizer.lr = 3e-3
    config.optimizer.weight_decay = 0.0
    return config
