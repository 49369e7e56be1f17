"""A DSpark drafter for Qwen3-4B on a TPU v5e-64, with the target in the program.

    python -m train.main --multihost --config=configs/qwen3_4b_dspark.py --workdir=gs://... --config.target=/models/Qwen3-4B

Each chip holds 8.1 of its 16 GB: parameters and optimizer state 0.5, target and tables 0.6, temporaries 6.6. A step of 512
sequences of 4,096 tokens is 516 TFLOP a chip, 1,617 GB through its memory and 195 GB through its links: 2.6 s at the speeds
of the data sheet if all of it overlaps, 8.6 s by the compiler's own estimate, which leaves links out. Estimates, since
nothing was run; they are from

    python -m train.compile --config=configs/qwen3_4b_dspark.py --topology=v5e:8x8 --parts=step
"""

from ml_collections import config_dict

from configs import qwen3_8b_dspark, targets


def get_config():
    config = qwen3_8b_dspark.get_config()
    config.target = "models/Qwen3-4B"
    config.target_sizes = targets.qwen3_4b()
    config.mesh = config_dict.ConfigDict({"data": 4, "fsdp": 4, "tensor": 4})
    config.batch.micro_steps = 32
    return config
