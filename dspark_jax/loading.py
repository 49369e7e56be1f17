"""Targets and drafters from wherever they lie."""

import dataclasses
import json
import pathlib

from dspark_jax import drafter as drafter_lib
from dspark_jax.checkpoints import gguf, huggingface, run, safetensors_files, targets
from dspark_jax.data import assets
from dspark_jax.target import Target
from dspark_jax.tokenizer import Tokenizer
from dspark_jax.whole_files import replacing

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
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
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


def load_drafter(where, target, step=None):
    """``where``: a Hugging Face directory in any layout of `dspark_jax.checkpoints.layouts`, a drafter that was saved
    here, or the directory of a training run -> `Drafter`. step: which checkpoint of a run; None: the newest.

    Raises ValueError or FileNotFoundError that names the file, field or tensor.
    """
    where = pathlib.Path(where)
    if is_run(where):
        return _load_run(where, target, step)
    if step is not None:
        raise ValueError(f"step: {step}; allowed: None, for {where} is not a training run")
    if not (where / "config.json").exists():
        raise FileNotFoundError(f"{where}: neither a drafter (config.json) nor a training run ({RUN_FILE})")
    return huggingface.load(where, target)


def save_drafter(drafter, where, layout="native", dtype=None):
    """Write ``drafter`` to the directory ``where``.

    layout: "native", "deepspec", "z-lab", "speculators" or "specforge". dtype: of the weights; None: bfloat16 for
    "native", else what the parameters have. The temperatures of a calibrated confidence head are "native" only: another
    layout gets the head without them. Raises ValueError for a drafter that the layout cannot express.
    """
    huggingface.save(drafter, where, layout, dtype)


def is_run(where):
    """Whether ``where`` is the directory of a training run."""
    return (pathlib.Path(where) / RUN_FILE).exists()


def _load_run(where, target, step):
    config, draft_to_target = read_run_file(where)
    _, params = run.restore_params(where, drafter_lib.abstract_params(config), step)
    return drafter_lib.attach(config, params, target, draft_to_target)


def read_run_file(where):
    """-> (`DrafterConfig`, draft vocabulary as a list of target ids or None) of the run directory ``where``.

    Raises ValueError naming the file and what is wrong in it.
    """
    file = pathlib.Path(where) / RUN_FILE
    data = safetensors_files.parse_json(file.read_bytes(), file)
    if not isinstance(data, dict) or set(data) != {"config", "draft_to_target"}:
        raise ValueError(f"{file}: must be an object with 'config' and 'draft_to_target'")
    config, ids = huggingface.config_from_dict(data["config"], file), data["draft_to_target"]
    if ids is not None and not (isinstance(ids, list) and len(ids) == config.draft_vocab_size == len(set(map(str, ids)))
                                and all(type(i) is int and 0 <= i < config.vocab_size for i in ids)):
        raise ValueError(f"{file}: draft_to_target: must be {config.draft_vocab_size} different ids of the target")
    return config, ids


def write_run_file(where, config, draft_to_target):
    """What `read_run_file` reads; raises ValueError if there is one that says something else."""
    ids = None if draft_to_target is None else [int(i) for i in draft_to_target]
    file = pathlib.Path(where) / RUN_FILE
    if file.exists():
        if read_run_file(where) != (config, ids):
            raise ValueError(f"{file}: this run began with another drafter or draft vocabulary; the token file has "
                             "changed since: choose another work directory")
        return
    with replacing(file, "w") as whole:
        json.dump({"config": dataclasses.asdict(config), "draft_to_target": ids}, whole)
