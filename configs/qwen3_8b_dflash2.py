"""A DFlash-2 drafter (dynamic convolutions and the Selector) for Qwen3-8B on a TPU v6e-64, with the target in the program.

    python -m train.main --multihost --config=configs/qwen3_8b_dflash2.py --workdir=gs://... --config.target=/models/Qwen3-8B

Each chip holds 11.8 of its 32 GB: parameters and optimizer state 0.5, target and tables 0.6, temporaries 10.3. A step of 512
sequences of 4,096 tokens is 930 TFLOP a chip, 3,457 GB through its memory and 329 GB through its links: 2.1 s at the speeds
of the data sheet if all of it overlaps, 6.4 s by the compiler's own estimate, which leaves links out. Estimates, since
nothing was run; they are from

    python -m train.compile --config=configs/qwen3_8b_dflash2.py --topology=v6e:8x8 --parts=step
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
