"""Drafters as Hugging Face directories: config.json and model.safetensors.

The "native" layout keeps the published tensor names of the backbone and heads, weights as [out, in], and every field of
`DrafterConfig` in config.json, the block layout included, so that nothing has to be guessed. Embedding and output head
are the target's and are not stored.
"""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from flax import traverse_util

from dspark_jax.backbone import BackboneConfig
from dspark_jax.drafter import DrafterConfig, abstract_params, attach, check_fit

ARCHITECTURE = "DSparkJaxDrafter"
LAYOUTS = ("native",)

_HEADS = {  # our path -> (published name, stored transposed)
    "transition/predecessor": ("markov_head.markov_w1.weight", False),
    "transition/successor": ("markov_head.markov_w2.weight", False),
    "transition/hidden_projection": ("markov_head.hidden_projection.weight", True),
    "transition/gate_kernel": ("markov_head.gate_proj.weight", True),
    "transition/gate_bias": ("markov_head.gate_proj.bias", False),
    "transition/joint_kernel": ("markov_head.joint_proj.weight", True),
    "transition/joint_bias": ("markov_head.joint_proj.bias", False),
    "confidence/kernel": ("confidence_head.proj.weight", False),
    "confidence/bias": ("confidence_head.proj.bias", False),
}
_OFFSETS = "d2t"  # target id = draft id + offset


def published_name(path):
    """('backbone', 'layers_0', 'mlp', 'up_proj', 'kernel') -> ('layers.0.mlp.up_proj.weight', stored transposed)."""
    head = _HEADS.get("/".join(path))
    if head:
        return head
    parts = [p.replace("layers_", "layers.") for p in path[1:]]
    if parts[-1] == "kernel":
        return ".".join([*parts[:-1], "weight"]), True
    if parts[-1] == "kernel_projection":
        return ".".join([*parts, "weight"]), True
    return ".".join(parts), False


def save_native(drafter, directory, dtype=jnp.bfloat16):
    """Write ``drafter`` (parameters as ``dtype``) to ``directory``, creating it."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, array in traverse_util.flatten_dict(drafter.params).items():
        name, transposed = published_name(path)
        tensors[name] = jnp.asarray(array.T if transposed else array, dtype)
    if drafter.draft_to_target is not None:
        tensors[_OFFSETS] = drafter.draft_to_target - jnp.arange(len(drafter.draft_to_target), dtype=jnp.int32)
    safetensors.flax.save_file(tensors, directory / "model.safetensors", metadata={"format": "flax"})
    config = {"architectures": [ARCHITECTURE], "model_type": "dspark_jax", **dataclasses.asdict(drafter.config)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_native(directory, target):
    """-> `Drafter` in float32. Raises ValueError naming the file and the field or tensor that is wrong."""
    directory = pathlib.Path(directory)
    config = read_config(directory / "config.json")
    try:
        check_fit(config, target.config)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
    file = directory / "model.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        stored = safetensors.flax.load_file(file)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file}: damaged safetensors file ({error})") from error
    draft_to_target = None
    if config.draft_vocab_size < config.vocab_size:
        offsets = _take(file, stored, _OFFSETS, (config.draft_vocab_size,))
        draft_to_target = np.asarray(offsets, np.int64) + np.arange(len(offsets))
        if draft_to_target.min() < 0 or draft_to_target.max() >= config.vocab_size:
            raise ValueError(f"{file}: tensor {_OFFSETS!r} points outside the vocabulary of {config.vocab_size}")
    params = {}
    for path, leaf in traverse_util.flatten_dict(abstract_params(config)).items():
        name, transposed = published_name(path)
        array = _take(file, stored, name, leaf.shape[::-1] if transposed else leaf.shape)
        params[path] = jnp.asarray(array.T if transposed else array, jnp.float32)
    if stored:
        raise ValueError(f"{file}: unknown tensors {sorted(stored)[:5]}; this drafter's config does not use them")
    return attach(config, traverse_util.unflatten_dict(params), target, draft_to_target)


def _take(file, stored, name, shape):
    if name not in stored:
        raise ValueError(f"{file}: tensor {name!r} is missing")
    array = stored.pop(name)
    if array.shape != shape:
        raise ValueError(f"{file}: tensor {name!r} has shape {array.shape}, expected {shape}")
    return array


def read_config(path):
    """config.json of a native drafter -> DrafterConfig. Raises ValueError naming the file and field."""
    path = pathlib.Path(path)
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:  # also bytes that are no text
        raise ValueError(f"{path}: not JSON ({error})") from error
    architectures = data.pop("architectures", None) if isinstance(data, dict) else None
    if architectures != [ARCHITECTURE]:
        raise ValueError(f"{path}: architectures is {architectures!r}; supported: [{ARCHITECTURE!r}]")
    data.pop("model_type", None)
    return config_from_dict(data, path)


def config_from_dict(data, path):
    """A DrafterConfig from nested plain values; unknown, missing or invalid fields raise ValueError naming ``path``."""
    try:
        backbone = _build(BackboneConfig, data.get("backbone"), "backbone")
        return _build(DrafterConfig, data | {"backbone": backbone}, "config")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _build(cls, data, what):
    """``cls(**data)`` where every field has the type that the dataclass declares."""
    if not isinstance(data, dict):
        raise ValueError(f"{what}: {data!r}; must be an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ValueError(f"{what}: unknown field {unknown[0]!r}; allowed: {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in data and field.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{what}: field {missing[0]!r} is missing")
    values = {}
    for name, value in data.items():
        expected = fields[name].type
        if expected == tuple[int, ...]:
            good = isinstance(value, (list, tuple)) and all(type(v) is int for v in value)
            value, expected = tuple(value) if good else value, "a list of whole numbers"
        elif expected is float:
            good, expected = type(value) in (int, float), "a number"
        else:
            good, expected = type(value) is expected, expected.__name__
        if not good:
            raise ValueError(f"{name}: {value!r}; must be {expected}")
        values[name] = value
    return cls(**values)
