"""A DFlash-2 drafter (dynamic convolutions and the Selector) for Qwen3-8B on a TPU v6e-64, with the target in the program.

    python -m train.main --multihost --config=configs/qwen3_8b_dflash2.py --workdir=gs://... --config.target=/models/Qwen3-8B

What a chip holds, computes and sends in a step, and the time that implies:

    python -m train.compile --config=configs/qwen3_8b_dflash2.py --topology=v6e:8x8
"""

from ml_collections import config_dict

from configs import qwen3_8b_dspark


def get_config():
    config = qwen3_8b_dspark.get_config()
    config.mesh = config_dict.ConfigDict({"data": 2, "fsdp": 8, "tensor": 4})
    config.batch.micro_steps = 32

    config.drafter.conv_kernel_size = 2
    config.drafter.layout = "fill_in"
    config.drafter.block_length = 15
    config.drafter.transition = "context"
    config.drafter.execution = "lattice"
    config.drafter.candidates = 16
    config.drafter.confidence = False
    config.batch.anchors = 256

    config.loss.ce = 0.0
    config.loss.l1 = 0.0
    config.loss.confidence = 0.0
    config.loss.unary = 1.0
    config.loss.candidates = 1.0
    config.loss.candidates_warmup = 2000
    return config
