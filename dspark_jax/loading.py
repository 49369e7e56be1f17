"""Targets and drafters from wherever they lie."""

import dataclasses
import json
import pathlib

from dspark_jax import drafter as drafter_lib
from dspark_jax.checkpoints import gguf, huggingface, run, targets
from dspark_jax.data import assets
from dspark_jax.target import Target
from dspark_jax.tokenizer import Tokenizer

SMOLLM2 = "smollm2-135m-instruct"
RUN_FILE = "drafter.json"  # in a run directory: the DrafterConfig and the draft vocabulary


def load_target(where, dtype=None):
    """``where``: a Hugging Face directory (config.json and safetensors of a Llama or Qwen3 model), a .gguf file, or
    "smollm2-135m-instruct" (fetched once, then read from the cache folder) -> `Target`.

    dtype: of the weights of a directory; None: as stored, but float32 for float16. GGUF weights become float32.
    Raises ValueError or FileNotFoundError that names the file and what is wrong with it.
    """
    path = assets.smollm2_gguf() if str(where) == SMOLLM2 else pathlib.Path(where)
    if path.is_dir():
        return _load_directory(path, dtype)
    if path.suffix != ".gguf":
        missing = "" if path.exists() else "no such file or directory; "
        raise ValueError(f"target {str(where)!r}: {missing}expected a Hugging Face directory, a .gguf file "
                         f"or {SMOLLM2!r}")
    config, params, metadata = gguf.read_target(path)
    tokenizer = Tokenizer.from_gguf(metadata)
    return Target(dataclasses.replace(config, stop_tokens=tuple(tokenizer.stop_tokens)), params, tokenizer)


def _load_directory(path, dtype):
    config = targets.read_config(path)
    tokenizer = Tokenizer.from_directory(path)  # before the weights: what can be wrong is found early
    if tokenizer is not None:
        if not config.stop_tokens:
            stops = tuple(i for i in tokenizer.stop_tokens if i < config.vocab_size)
            config = dataclasses.replace(config, stop_tokens=stops)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(f"{path / 'tokenizer.json'}: {tokenizer.vocab_size} tokens, but vocab_size in config.json "
                             f"is {config.vocab_size}")
    _, params = targets.read_target(path, dtype)
    return Target(config, params, tokenizer)


def load_drafter(where, target):
    """``where``: a Hugging Face directory in any layout of `dspark_jax.checkpoints.layouts`, a drafter that was saved
    here, or the directory of a training run -> `Drafter`.

    Raises ValueError or FileNotFoundError that names the file, field or tensor.
    """
    where = pathlib.Path(where)
    if is_run(where):
        return _load_run(where, target)
    if not (where / "config.json").exists():
        raise FileNotFoundError(f"{where}: neither a drafter (config.json) nor a training run ({RUN_FILE})")
    return huggingface.load(where, target)


def save_drafter(drafter, where, layout="native", dtype=None):
    """Write ``drafter`` to the directory ``where``.

    layout: "native", "deepspec", "z-lab", "speculators" or "specforge". dtype: of the weights; None: bfloat16 for
    "native", else what the parameters have. Raises ValueError for a drafter that the layout cannot express.
    """
    huggingface.save(drafter, where, layout, dtype)


def is_run(where):
    """Whether ``where`` is the directory of a training run."""
    return (pathlib.Path(where) / RUN_FILE).exists()


def _load_run(where, target):
    data = json.loads((where / RUN_FILE).read_text())
    config = huggingface.config_from_dict(data["config"], where / RUN_FILE)
    _, params = run.restore_params(where, drafter_lib.abstract_params(config))
    return drafter_lib.attach(config, params, target, data["draft_to_target"])
