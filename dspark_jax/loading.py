"""Targets and drafters from wherever they lie."""

import dataclasses
import json
import pathlib

from dspark_jax import drafter as drafter_lib
from dspark_jax.checkpoints import gguf, huggingface, run
from dspark_jax.data import assets
from dspark_jax.target import Target
from dspark_jax.tokenizer import Tokenizer

SMOLLM2 = "smollm2-135m-instruct"
RUN_FILE = "drafter.json"  # in a run directory: the DrafterConfig and the draft vocabulary


def load_target(where):
    """``where``: a .gguf file, or "smollm2-135m-instruct" (fetched once, then read from the cache folder) -> `Target`.

    Raises ValueError or FileNotFoundError that names the file and what is wrong with it.
    """
    path = assets.smollm2_gguf() if str(where) == SMOLLM2 else pathlib.Path(where)
    if path.suffix != ".gguf":
        raise ValueError(f"target {str(where)!r}: expected a .gguf file or {SMOLLM2!r}")
    config, params, metadata = gguf.read_target(path)
    tokenizer = Tokenizer.from_gguf(metadata)
    return Target(dataclasses.replace(config, stop_tokens=tuple(tokenizer.stop_tokens)), params, tokenizer)


def load_drafter(where, target):
    """``where``: a directory with config.json and model.safetensors, or the directory of a training run -> `Drafter`.

    Raises ValueError or FileNotFoundError that names the file, field or tensor.
    """
    where = pathlib.Path(where)
    if (where / RUN_FILE).exists():
        return _load_run(where, target)
    if not (where / "config.json").exists():
        raise FileNotFoundError(f"{where}: neither a drafter (config.json) nor a training run ({RUN_FILE})")
    return huggingface.load_native(where, target)


def save_drafter(drafter, where, layout="native"):
    """Write ``drafter`` to the directory ``where``; layout: "native" (see `dspark_jax.checkpoints.huggingface`)."""
    if layout not in huggingface.LAYOUTS:
        raise ValueError(f"layout: {layout!r}; allowed: {', '.join(huggingface.LAYOUTS)}")
    huggingface.save_native(drafter, where)


def _load_run(where, target):
    data = json.loads((where / RUN_FILE).read_text())
    config = huggingface.config_from_dict(data["config"], where / RUN_FILE)
    _, params = run.restore_params(where, drafter_lib.abstract_params(config))
    return drafter_lib.attach(config, params, target, data["draft_to_target"])
