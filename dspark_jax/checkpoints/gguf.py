"""GGUF files -> TargetConfig, parameters and metadata. Weights are de-quantised to float32.

Linear weights in the file are [out, in]; ours are [in, out]. Files of the ``llama`` architecture store the rows of the
query and key projections in interleaved rotary order; they are put back into half-split order here.
"""

import pathlib

import gguf
import jax.numpy as jnp
import numpy as np

from dspark_jax.target import TargetConfig

_TENSORS = {  # name inside a block -> path inside a layer
        "attn_norm": ("input_layernorm", "weight"),
        "ffn_norm": ("post_attention_layernorm", "weight"),
        "attn_q": ("self_attn", "q_proj", "weight"),
        "attn_k": ("self_attn", "k_proj", "weight"),
        "attn_v": ("self_attn", "v_proj", "weight"),
        "attn_output": ("self_attn", "o_proj", "weight"),
        "ffn_gate": ("mlp", "gate_proj", "weight"),
        "ffn_up": ("mlp", "up_proj", "weight"),
        "ffn_down": ("mlp", "down_proj", "weight"),
}


def _open(path):
    path = pathlib.Path(path)
    with open(path, "rb") as file:  # FileNotFoundError names the file
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (its first four bytes are not 'GGUF')")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever its parsing stumbles over
        raise ValueError(f"{path}: damaged GGUF file ({type(error).__name__}: {error})") from error


def read_metadata(path):
    """All key/value pairs of the file as Python values. Raises ValueError naming the file if it is not a sound GGUF."""
    return _metadata(_open(path))


def _metadata(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def read_target(path):
    """-> (TargetConfig, params, metadata). Raises ValueError for a damaged file, another architecture, or a tensor that
    is missing, unknown or of the wrong shape."""
    reader = _open(path)
    metadata = _metadata(reader)
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: general.architecture is {architecture!r}; supported in GGUF: 'llama'")
    tensors = {t.name: t for t in reader.tensors}
    config = _config(path, metadata, tied="output.weight" not in tensors)

    def take(name, shape):
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name!r} is missing")
        tensor = tensors.pop(name)
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{path}: tensor {name!r} of type {tensor.tensor_type} cannot be read ({error})") from error
        if array.shape != shape:
            raise ValueError(f"{path}: tensor {name!r} has shape {array.shape}, expected {shape}")
        return np.asarray(array, np.float32)

    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, k = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"attn_norm": (d,), "ffn_norm": (d,), "attn_q": (q, d), "attn_k": (k, d), "attn_v": (k, d),
              "attn_output": (d, q), "ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    params = {"embed_tokens": {"embedding": jnp.asarray(take("token_embd.weight", (v, d)))},
              "norm": {"weight": jnp.asarray(take("output_norm.weight", (d,)))}}
    if not config.tie_word_embeddings:
        params["lm_head"] = {"weight": jnp.asarray(take("output.weight", (v, d)))}
    for i in range(config.num_hidden_layers):
        layer = params[f"layers_{i}"] = {}
        for name, where in _TENSORS.items():
            array = take(f"blk.{i}.{name}.weight", shapes[name])
            if name in ("attn_q", "attn_k"):
                array = half_split_rows(array, config.head_dim)
            node = layer
            for part in where[:-1]:
                node = node.setdefault(part, {})
            node[where[-1]] = jnp.asarray(array)
    if tensors:
        raise ValueError(f"{path}: unknown tensors {sorted(tensors)[:5]}")
    return config, params, metadata


def half_split_rows(weight, head_dim):
    """Rows of one head from interleaved rotary order (0, C/2, 1, C/2+1, ...) to half-split order; weight [heads*C, in]."""
    return weight.reshape(-1, head_dim // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _config(path, metadata, tied):
    def get(key, default=None, kind=int):
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise ValueError(f"{path}: metadata field 'llama.{key}' is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0 or value != kind(value):
            raise ValueError(f"{path}: metadata field 'llama.{key}' is {value!r}; must be a positive number")
        return kind(value)

    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{path}: metadata field 'llama.rope.scaling.type' is {scaling!r}; supported in GGUF: 'none'")
    heads = get("attention.head_count")
    kv_heads, head_dim = get("attention.head_count_kv", heads), get("attention.key_length", get("embedding_length") // heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"{path}: {heads} heads, {kv_heads} key/value heads of width {head_dim}; the first must be a "
                         "multiple of the second, and the width even")
    return TargetConfig(
        vocab_size=get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=get("embedding_length"), intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=get("context_length"), rope_theta=get("rope.freq_base", 10000.0, float),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", kind=float), tie_word_embeddings=tied)
