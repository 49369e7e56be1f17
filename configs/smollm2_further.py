"""Further training of a joint-gated drafter on all of the shipped text, with Muon: the last stage of the shipped one.

    python -m train.main --config=configs/smollm2_further.py --workdir=runs/further --config.init_from=runs/earlier

Blocks of four drafts where three are used: the fourth costs little and trains the same heads. The later answers
(dspark_jax/data/README.md) weigh more, because the drafter knows the earlier ones.
"""

from configs import smollm2


def get_config():
    config = smollm2.get_config()
    config.steps = 480
    config.seed = 7
    config.log_every = 10
    config.compute_dtype = "bfloat16"
    config.data.source_weights = {"wiki": 0.0, "code": 1.2, "code2": 2.5, "chat2": 2.5, "gsm8k2": 1.5}
    config.evaluation.prompts = 0
    config.evaluation.blocks_every = 0
    config.batch.sequences = 16
    config.batch.anchors = 96
    config.drafter.transition = "joint"
    config.drafter.execution = "sequential"
    config.drafter.confidence = False  # trained alone, on text that the drafter has not seen: configs/smollm2_confidence.py
    config.loss.confidence = 0.0
    config.optimizer.kind = "muon"
    config.optimizer.lr = 1.3e-3
    config.optimizer.warmup_steps = 20
    return config
