"""Train a drafter.

    python -m train.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m train.main --config=configs/quickstart.py --workdir=runs/other --config.optimizer.lr=1e-3

Started again with the same command, a run that was interrupted goes on from its newest checkpoint. SIGTERM and Ctrl-C
let it finish its step and save it; a second one ends it at once. How it is logged and kept, evaluated and spread over
devices may change from start to start; what is trained may not.
"""

from absl import flags
from ml_collections import config_flags

from dspark_jax import sharding
from train import command_line, loop, signals

_CONFIG = config_flags.DEFINE_config_file("config", None, "Python file with get_config(); see configs/.", lock_config=True)
_MULTIHOST = flags.DEFINE_bool(
    "multihost", False, "One of several processes, each started with this same command: on a TPU pod they find each other. "
    "Elsewhere JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID say who they are.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: checkpoints, metrics.jsonl, tensorboard.")
flags.mark_flags_as_required(["config", "workdir"])


def main():
    if _MULTIHOST.value:
        sharding.join_processes()
    with signals.stop_requests() as stop:
        loop.train(_CONFIG.value, _WORKDIR.value, stop=stop)


if __name__ == "__main__":
    command_line.run(main)
