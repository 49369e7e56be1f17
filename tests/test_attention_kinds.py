"""Sliding windows, causality inside the block and rotary scaling: against slow versions, in both paths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import cache as kv
from dspark_jax import drafter as drafter_lib
from dspark_jax import layers
from dspark_jax.backbone import Attention, Backbone, BackboneConfig, attend_context_and_block, restrict

KINDS = [
    Attention(), Attention(causal=True), Attention(window=3), Attention(window=3, causal=True), Attention(window=9)]


def slow_attention(kind, query, context, block, anchors, positions):
    """One slot, one key at a time. query [B, N, J, H, C], context [B, S, K, C], block [B, N, J, K, C]."""
    B, N, J, H, C = query.shape
    S, K = context[0].shape[1:3]
    out = np.zeros((B, N, J, H, C))
    for b, n, j, h in np.ndindex(B, N, J, H):
        scores, values = [], []
        for place in [*range(S), *(range(S, S + J))]:
            if place < S:
                key, value, at = context[0][b, place, h * K // H], context[1][b, place, h * K // H], place
                seen = at < anchors[b, n]
            else:
                key, value = block[0][b, n, place - S, h * K // H], block[1][b, n, place - S, h * K // H]
                at = positions[b, n, place - S]
                seen = not kind.causal or place - S <= j
            if seen and (not kind.window or abs(positions[b, n, j] - at) < kind.window):
                scores.append(query[b, n, j, h] @ key / np.sqrt(C))
                values.append(value)
        weights = np.exp(np.array(scores) - max(scores))
        out[b, n, j, h] = weights / weights.sum() @ np.array(values)
    return out.reshape(B, N, J, H * C)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_sees_what_its_kind_says(kind):
    rng = np.random.default_rng(0)
    B, N, J, H, K, C, S = 2, 2, 5, 4, 2, 6, 8
    query = rng.normal(size=(B, N, J, H, C)).astype(np.float32)
    context = [rng.normal(size=(B, S, K, C)).astype(np.float32) for _ in range(2)]
    block = [rng.normal(size=(B, N, J, K, C)).astype(np.float32) for _ in range(2)]
    anchors = np.array([[0, 3], [5, 7]])
    positions = anchors[..., None] + np.arange(J)
    @jax.jit
    def attend(query, context, block, positions):
        visible, inside = restrict(kind, jnp.arange(S) < anchors[..., None], positions)
        return attend_context_and_block(query, context, block, visible, inside)

    found = attend(query, context, block, positions)
    np.testing.assert_allclose(found, slow_attention(kind, query, context, block, anchors, positions), atol=2e-6)


def backbone_config(attention):
    return BackboneConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=4, conv_kernel_size=2, conv_group_size=4, attention=attention)


@pytest.mark.parametrize("kind, packed", [*((kind, False) for kind in KINDS[1:]), (KINDS[3], True)], ids=str)
@pytest.mark.parametrize("layout", ["anchor_first", "fill_in"])
def test_training_and_cached_decoding_agree(kind, packed, layout):
    """A block in training, also of sequences packed into one row, equals the same block drafted from a cache that is
    longer than its context, with rubbish."""
    config = drafter_lib.DrafterConfig(
        backbone=backbone_config((kind, Attention(window=4))), vocab_size=20, draft_vocab_size=20, block_length=4,
        layout=layout, target_layer_ids=(0, 1), mask_token_id=3, transition="none", input_embedding_scale=1.7)
    params = jax.tree.map(lambda a: a + 0.3 * jax.random.normal(jax.random.key(a.size), a.shape),
                          drafter_lib.init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(1)
    embedding = jnp.asarray(rng.normal(size=(20, 16)), jnp.float32)
    features = jnp.asarray(rng.normal(size=(2, 9, 32)), jnp.float32)
    tokens = rng.integers(4, 20, (2, 9)).astype(np.int32)
    anchors = np.array([[1, 6], [8, 4]], np.int32)
    batch = features, jnp.asarray(tokens), jnp.asarray(anchors), jnp.ones((2, 2), bool)
    if packed:
        numbers, offsets = np.repeat([[4], [2]], 9, axis=1), np.array([[0], [9]])
        batch = [a.reshape(1, -1, *a.shape[2:]) for a in (*batch[:2], batch[2] + offsets, batch[3], numbers)]
    hidden = jax.jit(drafter_lib.training_hidden, static_argnums=0)(config, params, embedding, *batch)

    rows = np.array([0, 0, 1, 1])  # one for each block

    @jax.jit
    def draft(features, anchors, starts):
        positions = jnp.broadcast_to(jnp.arange(9), (4, 9))
        pairs = Backbone(config.backbone).apply(
            {"params": params["backbone"]}, features, positions, method=Backbone.context)
        cache = kv.empty_cache(config.backbone.num_hidden_layers, 4, 16, config.backbone.num_key_value_heads,
                               config.backbone.head_dim)
        rubbish = jax.tree.map(lambda a, new: kv.write(a + 99, new, jnp.zeros(4, jnp.int32)), cache, pairs)
        return drafter_lib.propose(config, params, embedding, embedding, None, rubbish, anchors, starts,
                                   jax.random.split(jax.random.key(0), 4), 1.0, "sequential", None).q

    starts = anchors.reshape(-1)
    found = draft(features[rows], jnp.asarray(tokens[rows, starts]), jnp.asarray(starts))
    expected = jax.nn.softmax(hidden.reshape(4, 4, 16) @ embedding.T, axis=-1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_configs_have_one_spelling():
    assert backbone_config((Attention(), Attention())) == backbone_config(())
    assert backbone_config((Attention(window=2), Attention())).attention_of(0).window == 2
    with pytest.raises(ValueError, match="attention: 1 entries for 2 layers"):
        backbone_config((Attention(window=2),))
    with pytest.raises(ValueError, match="window"):
        Attention(window=-1)


@pytest.mark.parametrize("field, value", [
    ("num_key_value_heads", 3), ("head_dim", 5), ("hidden_size", 0), ("conv_group_size", 5)])
def test_sizes_that_do_not_fit_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(backbone_config(()), **{field: value})


def slow_llama3(i, half, theta, s):
    """The rule as it is stated, by wavelength, for one frequency."""
    frequency = theta ** (-i / half)
    wavelength = 2 * np.pi / frequency
    if wavelength < s.original_max_position_embeddings / s.high_freq_factor:
        return frequency
    if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
        return frequency / s.factor
    turns = s.original_max_position_embeddings / wavelength
    smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - smooth) * frequency / s.factor + smooth * frequency


def test_rotary_scaling():
    scaling = layers.RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                 original_max_position_embeddings=8192)
    expected = [slow_llama3(i, 64, 5e5, scaling) for i in range(64)]
    plain = layers.rotary_frequencies(64, 5e5)
    np.testing.assert_allclose(layers.rotary_frequencies(64, 5e5, scaling), expected, rtol=2e-6)
    assert len({round(float(a / b), 3) for a, b in zip(plain, expected)}) > 4  # all three parts of the rule are met
    linear = layers.RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(layers.rotary_frequencies(64, 5e5, linear), plain / 4, rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    np.testing.assert_allclose(layers.rotate(x, jnp.array([[4, 8, 40]]), 1e4, linear),
                               layers.rotate(x, jnp.array([[1, 2, 10]]), 1e4), atol=1e-6)
    for bad in ({"kind": "yarn", "factor": 2.0}, {"kind": "linear", "factor": 0.5},
                {"kind": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}):
        with pytest.raises(ValueError):
            layers.RopeScaling(**bad)


def test_16_bit_weights_give_32_bit_logits():
    rows = jax.random.normal(jax.random.key(0), (50, 16), jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(1), (3, 16), jnp.bfloat16)
    found = layers.table_logits(hidden, rows)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(hidden, np.float64) @ np.asarray(rows, np.float64).T, atol=1e-5)
