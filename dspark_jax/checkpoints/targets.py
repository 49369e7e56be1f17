"""Targets as Hugging Face directories: config.json and safetensors of a Llama or Qwen3 decoder."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dspark_jax import target as target_lib
from dspark_jax.checkpoints import safetensors_files, tensors, transformer_fields
from dspark_jax.checkpoints.fields import Fields
from dspark_jax.target import TargetConfig

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # -> whether query and key heads are normed
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(directory) -> TargetConfig:
    """config.json, and generation_config.json for the stop tokens.

    Raises FileNotFoundError or ValueError naming the file and the field.
    """
    directory = pathlib.Path(directory)
    fields = Fields.read(directory / "config.json")
    architectures = fields.texts("architectures", ())
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        fields.refuse("architectures", f"one of {', '.join(repr([name]) for name in ARCHITECTURES)} for a target")
    if fields.boolean("mlp_bias", False):
        fields.refuse("mlp_bias", "false")
    if fields.boolean("use_sliding_window", False) or transformer_fields.SLIDING in fields.texts("layer_types", ()):
        raise ValueError(f"{fields.path}: layer_types, use_sliding_window: windows are not supported in a target")
    sizes = transformer_fields.read_sizes(fields)
    vocab_size = fields.integer("vocab_size", least=1)
    return TargetConfig(
        **sizes,
        vocab_size=vocab_size,
        max_position_embeddings=fields.integer("max_position_embeddings", least=1),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qk_norm=ARCHITECTURES[architectures[0]],
        stop_tokens=_stop_tokens(directory, fields, vocab_size),
    )


def _stop_tokens(directory, config, vocab_size):
    """eos_token_id, an id or a list: of generation_config.json, else of config.json, else nothing."""
    generation = directory / "generation_config.json"
    for fields in ([Fields.read(generation)] if generation.is_file() else []) + [config]:
        if not fields.has("eos_token_id"):
            continue
        if isinstance(fields.raw("eos_token_id"), list):
            ids = fields.integers("eos_token_id")
        else:
            ids = (fields.integer("eos_token_id"),)
        if any(i >= vocab_size for i in ids):
            fields.refuse("eos_token_id", f"below vocab_size, {vocab_size}")
        return tuple(dict.fromkeys(ids))
    return ()


def published_name(path) -> str:
    """('layers_0', 'mlp', 'up_proj', 'weight') -> 'model.layers.0.mlp.up_proj.weight'."""
    parts = [part.replace("layers_", "layers.") for part in path]
    if parts[-1] == "embedding":
        parts[-1] = "weight"
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def read_target(directory, dtype=None) -> tuple[TargetConfig, dict]:
    """-> (config, params). Tensors go to the device one by one, each in the dtype it is stored in (float16: float32)
    unless ``dtype`` says otherwise.

    Raises FileNotFoundError or ValueError naming the file and the field or tensor that is wrong.
    """
    directory = pathlib.Path(directory)
    config = read_config(directory)
    stored = safetensors_files.read_directory(directory)
    if config.num_hidden_layers > len(stored):  # before a layer is made for each
        raise ValueError(f"{directory / 'config.json'}: num_hidden_layers: {config.num_hidden_layers}, but there are "
                         f"only {len(stored)} tensors")
    entries = _entries(config)
    unused = {name for name in stored if name.endswith(".self_attn.rotary_emb.inv_freq")}  # derived; in old files
    if config.tie_word_embeddings and HEAD in stored:  # some tied checkpoints store the same table twice
        _check_copy(stored, EMBEDDING, HEAD)
        unused.add(HEAD)
    tensors.check(directory, stored, stored_entries(config), unused)
    params = {path: tensors.place(stored[entry.name], entry, shape, dtype) for path, (entry, shape) in entries.items()}
    return config, traverse_util.unflatten_dict(params)


@functools.lru_cache(maxsize=16)
def _entries(config):
    """How every parameter of a target is stored: {path: (Entry, our shape)}."""
    entries = {}
    for path, leaf in traverse_util.flatten_dict(abstract_params(config)).items():
        entries[path] = tensors.Entry.of(published_name(path), leaf.shape), leaf.shape
    return entries


def stored_entries(config: TargetConfig) -> list[tensors.Entry]:
    """The tensors that a directory with this config must hold."""
    return [entry for entry, _ in _entries(config).values()]


def abstract_params(config: TargetConfig):
    """The parameter tree of a target with shapes instead of arrays."""
    return jax.eval_shape(lambda: target_lib.Decoder(config).init(
        jax.random.key(0), jnp.zeros((1, 1), jnp.int32), method=target_lib.Decoder.everything)["params"])


def _check_copy(stored, name, copy):
    a, b = stored.get(name), stored[copy]
    if a is None or a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(a.map(), b.map()):
        raise ValueError(f"{b.file}: tensor {copy!r} {list(b.shape)} differs from {name!r}, but tie_word_embeddings is "
                         "true")
