"""A DSpark drafter for Qwen3-4B on a TPU v5e-64, with the target in the program.

    python -m train.main --multihost --config=configs/qwen3_4b_dspark.py --workdir=gs://... --config.target=/models/Qwen3-4B

What a chip holds, computes and sends in a step, and the time that implies:

    python -m train.compile --config=configs/qwen3_4b_dspark.py --topology=v5e:8x8
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
