"""Trains the drafters of experiments/six.py that are not trained yet, one after the other.

  python -m experiments.train --workdir=runs/six --init_backbone=runs/first

Killed and started again, it goes on where it was. SIGTERM and Ctrl-C save the step that is running.
"""

import pathlib

from absl import flags

from experiments import six
from train import command_line, loop, measure, signals

_WORKDIR = flags.DEFINE_string("workdir", "runs/six", "Directory of the runs, one directory each.")
_INIT_BACKBONE = flags.DEFINE_string(
    "init_backbone", None, "A drafter whose backbone the common backbone begins with; a fresh one by default.")
_ONLY = flags.DEFINE_list("only", ["backbone", *six.SIX, "long"], "Which ones.")


def main():
    configs = {name: six.get_config(name) for name in _ONLY.value}
    workdir = pathlib.Path(_WORKDIR.value)
    target = measure.load_target("smollm2-135m-instruct")
    with signals.stop_requests() as stop:
        for name, config in configs.items():
            config.features.directory = str(workdir / "features")  # the same text for all of them
            if name == "long":
                config.init_from = str(workdir / "vanilla")
            else:
                config.init_backbone = _INIT_BACKBONE.value if name == "backbone" else str(workdir / "backbone")
            print(f"{name}: {config.steps} steps", flush=True)
            loop.train(config, workdir / name, target, stop)


if __name__ == "__main__":
    command_line.run(main)
