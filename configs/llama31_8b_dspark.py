"""A DSpark drafter for Llama-3.1-8B-Instruct on a TPU v6e-64, with the target in the program.

    python -m train.main --multihost --config=configs/llama31_8b_dspark.py --workdir=gs://... \\
        --config.target=/models/Llama-3.1-8B-Instruct

Each chip holds 7.7 of its 32 GB: parameters and optimizer state 0.5, target and tables 0.6, temporaries 6.3. A step of 512
sequences of 4,096 tokens is 861 TFLOP a chip, 1,887 GB through its memory and 304 GB through its links: 1.7 s at the speeds
of the data sheet if all of it overlaps, 3.6 s by the compiler's own estimate, which leaves links out. Estimates, since
nothing was run; they are from

    python -m train.compile --config=configs/llama31_8b_dspark.py --topology=v6e:8x8 --parts=step
"""

from ml_collections import config_dict

from configs import qwen3_8b_dspark, targets


def get_config():
    config = qwen3_8b_dspark.get_config()
    config.target = "models/Llama-3.1-8B-Instruct"
    config.target_sizes = targets.llama31_8b()
    config.mesh = config_dict.ConfigDict({"data": 2, "fsdp": 8, "tensor": 4})
    config.batch.micro_steps = 32

    config.drafter.target_layer_ids = (1, 8, 15, 22, 29)
    config.drafter.mask_token_id = 128_002  # a reserved token, which no text contains
    config.drafter.draft_vocab_size = 128_256
    return config
