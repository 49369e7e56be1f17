"""Six drafters for SmolLM2-135M that differ in their heads alone, and the backbone that all of them begin with.

    python -m experiments.train --workdir=runs/six                      (all of them, one after the other)
    python -m train.main --config=experiments/six.py:vanilla --workdir=runs/six/vanilla \
        --config.init_backbone=runs/six/backbone                        (one)

`backbone` trains DFlash, no transition at all, on all of the text. Each of the six goes on from it, all parts of it
trained, for the same number of steps on the same batches: what a drafter has then seen is the same for all of them, and if
the common beginning favours one, it is `none`. The first five have the same loss, so that what differs is the head; `selector`
has DFlash-2's own, the cross-entropy of the base logits and that of the candidates, and its convolutions, which begin as
the identity. `long` is `vanilla` with blocks of 15, for the table of block lengths.
"""

from configs import smollm2

TRANSITIONS = {"none": "none", "vanilla": "vanilla", "joint": "joint", "recurrent": "recurrent", "context": "context",
               "selector": "context"}
SIX = tuple(TRANSITIONS)


def get_config(name):
    if name not in ("backbone", "long", *SIX):
        raise ValueError(f"experiments/six.py:{name}: unknown; allowed: backbone, long, {', '.join(SIX)}")
    config = smollm2.get_config()
    config.steps = 160
    config.checkpoint_every = 40
    config.log_every = 10
    config.compute_dtype = "bfloat16"
    config.data.conversations = 3968  # what there was when the six were trained
    config.data.source_weights = {"wiki": 0.0, "code": 1.5}
    config.evaluation.prompts = 0
    config.evaluation.blocks_every = 0
    config.batch.anchors = 48
    config.drafter.block_length = 7
    config.drafter.transition = TRANSITIONS.get(name, "vanilla")
    config.drafter.execution = "lattice" if name == "selector" else "sequential"
    config.drafter.confidence = False  # trained alone, on text that the drafter has not seen: configs/smollm2_confidence.py
    config.loss.confidence = 0.0
    config.optimizer.lr = 6e-4
    if name == "backbone":
        config.steps = 640
        config.drafter.transition = "none"
        config.optimizer.lr = 1.2e-3
        config.optimizer.decay_steps = 1280  # the rate is where the six begin when this ends
        config.checkpoint_keep_every = 160
    if config.drafter.transition == "none":
        config.drafter.transition_init = "normal"
    if name == "selector":
        config.drafter.conv_kernel_size = 2
        config.loss.ce = config.loss.l1 = 0.0
        config.loss.unary = config.loss.candidates = 1.0
        config.loss.missing_label = "inject"
    if name == "long":
        config.steps = 80
        config.drafter.block_length = 15
        config.batch.anchors = 24
        config.loss.decay = 7.0
    return config
