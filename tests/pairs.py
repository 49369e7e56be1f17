"""The tiny trained target/drafter pairs in tests/goldens as our own objects, and tiny random ones.

Published tensors are read one by one and put where our parameter tree has them, without the library's own loaders.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import traverse_util

import dspark_jax as ds
from dspark_jax import drafter as drafter_lib
from dspark_jax import target as target_lib
from dspark_jax.backbone import Attention, BackboneConfig
from dspark_jax.checkpoints.huggingface import published_name
from golden import GOLDENS

DEEPSPEC_TRANSITIONS = {"vanilla": "vanilla", "gated": "joint", "rnn": "recurrent"}
ZLAB_NAMES = {  # where DFlash-2 names the Selector's tensors differently: (name, stored transposed)
    "transition/predecessor": ("candidate_selector.predecessor_codebook", False),
    "transition/successor": ("candidate_selector.successor_codebook", False),
    "transition/hidden_projection": ("candidate_selector.hidden_projection.weight", True),
}
MASK = 256


def _directory(name):
    directory = GOLDENS / name
    config = json.loads((directory / "config.json").read_text())
    return config, safetensors.numpy.load_file(directory / "model.safetensors")


def _shared(config):
    """The fields that targets and backbones have in common."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "attention_bias")
    return {name: config[name] for name in names} | {"rope_theta": config["rope_parameters"]["rope_theta"]}


def target(name):
    """"dspark/target" (Qwen3, untied) or "dflash/target_model" (Llama, tied) -> `ds.Target`."""
    config, tensors = _directory(name)
    ours = ds.TargetConfig(
        **_shared(config), vocab_size=config["vocab_size"], max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=config["tie_word_embeddings"], qk_norm=config["model_type"] == "qwen3",
        stop_tokens=(config["eos_token_id"],))
    tree = {}
    for published, array in tensors.items():
        parts = published.removeprefix("model.").split(".")
        if parts[0] == "layers":
            parts = [f"layers_{parts[1]}", *parts[2:]]
        if parts[0] == "embed_tokens":
            parts[-1] = "embedding"
        tree[tuple(parts)] = jnp.asarray(array)
    assert {p: a.shape for p, a in tree.items()} == {
        p: a.shape for p, a in traverse_util.flatten_dict(abstract_target_params(ours)).items()}
    return ds.Target(ours, traverse_util.unflatten_dict(tree))


def abstract_target_params(config):
    init = lambda: target_lib.Decoder(config).init(
        jax.random.key(0), jnp.zeros((1, 1), jnp.int32), method=target_lib.Decoder.everything)["params"]
    return jax.eval_shape(init)


def drafter_config(config):
    """Our config for a published config.json of DeepSpec or z-lab."""
    z = config.get("dflash_config", {})
    windows = [config["sliding_window"] if kind == "sliding_attention" else 0 for kind in config["layer_types"]]
    backbone = BackboneConfig(**_shared(config), conv_kernel_size=z.get("conv_kernel_size", 0),
                              conv_group_size=z.get("conv_group_size", 16),
                              attention=tuple(Attention(window=w) for w in windows))
    fields = {
        "backbone": backbone,
        "vocab_size": config["vocab_size"], "draft_vocab_size": config["vocab_size"], "mask_token_id": MASK}
    if z:
        block = z.get("block_size", config.get("block_size"))
        fields |= {"layout": "fill_in", "block_length": block - 1, "target_layer_ids": tuple(z["target_layer_ids"]),
                   "transition": "none", "rank": 0, "output_multiplier": z.get("output_multiplier", 1.0),
                   "final_logit_softcapping": z.get("final_logit_softcapping", 0.0)}
        if "selector_rank" in z:
            fields |= {"transition": "context", "rank": z["selector_rank"], "execution": "lattice",
                       "candidates": z["selector_top_k"]}
    else:
        rank = config["markov_rank"]
        fields |= {"layout": "anchor_first", "block_length": config["block_size"], "rank": rank,
                   "target_layer_ids": tuple(config["target_layer_ids"]),
                   "transition": DEEPSPEC_TRANSITIONS[config["markov_head_type"]] if rank else "none",
                   "confidence": config["enable_confidence_head"]}
    return drafter_lib.DrafterConfig(**fields)


def place(path, zlab):
    """Our path -> (published name, stored transposed)."""
    return (ZLAB_NAMES.get("/".join(path)) if zlab else None) or published_name(path)


def to_published(params, zlab=False):
    """Our tree, for instance of gradients -> {published name: array as published}."""
    out = {}
    for path, array in traverse_util.flatten_dict(params).items():
        name, transposed = place(path, zlab)
        out[name] = np.asarray(array).T if transposed else np.asarray(array)
    return out


def drafter(name, pair_target):
    """"dspark/draft_vanilla", ..., "dflash/draft_v2" -> `ds.Drafter`; every published tensor is used."""
    config, tensors = _directory(name)
    ours, zlab = drafter_config(config), "dflash_config" in config
    # DeepSpec stores copies of the target's tables, z-lab stores none.
    embedding = tensors.pop("embed_tokens.weight", np.asarray(pair_target.embedding()))
    head_rows = tensors.pop("lm_head.weight", np.asarray(pair_target.head_rows()))
    tree = {}
    for path, leaf in traverse_util.flatten_dict(drafter_lib.abstract_params(ours)).items():
        published, transposed = place(path, zlab)
        array = tensors.pop(published)
        array = array.T if transposed else array
        if path[0] == "confidence":  # [1, D] and [1] there, [D] and [] here
            array = array.reshape(leaf.shape)
        assert array.shape == leaf.shape, (path, array.shape, leaf.shape)
        tree[path] = jnp.asarray(array)
    assert not tensors, f"not used: {sorted(tensors)}"
    return ds.Drafter(ours, traverse_util.unflatten_dict(tree), jnp.asarray(embedding), jnp.asarray(head_rows))


def random_target(seed=0, vocab_size=48, hidden_size=32, layers=2, heads=4, kv_heads=2, head_spread=0.2,
                  depth=1.0, **fields):
    """A random Llama target whose law is far from uniform. The embedding is wide, so that the last token matters most.

    ``head_spread``: standard deviation of the output head's weights, if it is not tied to the embedding; ``depth``: how
    much the layers add to what the embedding says.
    """
    config = ds.TargetConfig(**{
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads, "max_position_embeddings": 512, "stop_tokens": (0,), **fields})
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if leaf.ndim == 1:
            return jnp.ones(leaf.shape)
        spread = {"embed_tokens": 1.0, "lm_head": head_spread}.get(path[0].key, leaf.shape[1] ** -0.5)
        spread *= depth if path[-2].key in ("o_proj", "down_proj") else 1.0
        linear = path[0].key != "embed_tokens"
        array = rng.normal(size=leaf.shape[::-1]).T if linear else rng.normal(size=leaf.shape)
        return jnp.asarray(array * spread, jnp.float32)

    return ds.Target(config, jax.tree_util.tree_map_with_path(draw, abstract_target_params(config)))


def random_drafter(pair_target, seed=1, draft_ids=None, heads=2, kv_heads=1, layers=1, conv_kernel_size=0, **fields):
    """A random drafter for ``pair_target``; ``draft_ids``: the target ids it can draft, ascending."""
    t = pair_target.config
    config = ds.DrafterConfig(**{
        "backbone": BackboneConfig(
            hidden_size=t.hidden_size, intermediate_size=t.hidden_size, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, conv_kernel_size=conv_kernel_size,
            conv_group_size=8),
        "vocab_size": t.vocab_size, "draft_vocab_size": t.vocab_size if draft_ids is None else len(draft_ids),
        "block_length": 4, "layout": "anchor_first", "target_layer_ids": (-1, 1), "mask_token_id": 1, "rank": 8,
        "candidates": 6, **fields})
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == "weight" and leaf.ndim == 1:  # of a norm
            return jnp.ones(leaf.shape)
        linear = path[-1].key == "weight"
        array = rng.normal(size=leaf.shape[::-1]).T if linear else rng.normal(size=leaf.shape)
        return jnp.asarray(array * 0.3, jnp.float32)  # so wide that term and context matter

    params = jax.tree_util.tree_map_with_path(draw, drafter_lib.abstract_params(config))
    return drafter_lib.attach(config, params, pair_target, draft_ids)


def expected(name):
    """A file such as "dspark/expected_vanilla" as nested plain values."""
    return json.loads((GOLDENS / f"{name}.json").read_text())

