"""A DSpark drafter for Qwen3-8B on a TPU v5e-256, with the target in the program.

    python -m train.main --multihost --config=configs/qwen3_8b_dspark.py --workdir=gs://... --config.target=/models/Qwen3-8B

Each chip holds 8.3 of its 16 GB: parameters and optimizer state 0.4, target and tables 0.6, temporaries 6.9. A step of 512
sequences of 4,096 tokens is 216 TFLOP a chip, 540 GB through its memory and 80 GB through its links: 1.1 s at the speeds
of the data sheet if all of it overlaps, 2.7 s by the compiler's own estimate, which leaves links out. Estimates, since
nothing was run; they are from

    python -m train.compile --config=configs/qwen3_8b_dspark.py --topology=v5e:16x16
"""

from ml_collections import config_dict

from configs import smollm2, targets


def get_config():
    config = smollm2.get_config()
    config.target = "models/Qwen3-8B"  # a directory with config.json and *.safetensors
    config.target_sizes = targets.qwen3_8b()
    config.steps = 20_000
    config.checkpoint_every = 500
    config.mesh = config_dict.ConfigDict({"data": 8, "fsdp": 8, "tensor": 4})
    config.compute_dtype = "bfloat16"

    config.data.max_length = 4096
    config.data.source_weights = config_dict.ConfigDict()
    config.features.cached = False
    config.evaluation.prompts = 0

    config.drafter.num_hidden_layers = 5
    config.drafter.block_length = 7
    config.drafter.target_layer_ids = (1, 9, 17, 25, 33)
    config.drafter.mask_token_id = 151_669
    config.drafter.draft_vocab_size = 151_936
    config.drafter.transition_init = "normal"
    config.drafter.rank = 256
    config.drafter.execution = "sequential"

    config.batch.sequences = 512
    config.batch.anchors = 512
    config.batch.micro_steps = 8

    config.loss.ce = 0.1
    config.loss.l1 = 0.9
    config.loss.confidence = 1.0

    config.optimizer.lr = 6e-4
    config.optimizer.warmup_steps = 800
    config.optimizer.weight_decay = 0.0
    return config
