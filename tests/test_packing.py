"""Packed rows: nothing crosses from one document into another, and every document gets its anchors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pairs
from dspark_jax import anchors as anchors_lib
from dspark_jax import packing
from dspark_jax import target as target_lib
from dspark_jax.backbone import Attention, BackboneConfig
from dspark_jax.data.documents import Documents
from dspark_jax.loss_weights import LossWeights, loss_denominators
from golden import close
from train import batches, loop, objective

DOCUMENTS = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5]])


def test_positions_and_masks_by_hand():
    assert packing.positions(DOCUMENTS).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert packing.first_tokens(DOCUMENTS).astype(int).tolist() == [[1, 0, 0, 1, 1, 0, 1, 0], [1] + [0] * 7]
    mask = jnp.ones(DOCUMENTS.shape)
    assert packing.supervised(mask, DOCUMENTS).tolist() == [[0, 1, 1, 0, 0, 1, 0, 1], [0] + [1] * 7]
    assert packing.supervised(mask > 0, DOCUMENTS).dtype == bool


# ------------------------------------------------------------------------------------------------------------- anchors


def test_anchors_are_shared_out_among_documents():
    """40, 3 and 12 candidates and 15 anchors: all of the short document's, and 6 of each other's."""
    lengths = [42, 5, 14]
    documents = jnp.asarray(np.repeat([1, 2, 3], lengths))[None]
    mask = packing.supervised(jnp.ones(documents.shape), documents)
    draw = jax.jit(lambda key: anchors_lib.sample_anchors(key, mask, 15, documents))
    counts, seen = np.zeros(61), []
    for seed in range(400):
        anchors, keep = draw(jax.random.key(seed))
        assert keep.all() and (np.diff(anchors[0]) > 0).all()
        of = np.bincount(np.asarray(documents[0, anchors[0]]), minlength=4)[1:]
        assert of.tolist() == [6, 3, 6]
        counts[np.asarray(anchors[0])] += 1
        seen.append(anchors)
    assert counts[[0, 41, 42, 46, 47, 60]].sum() == 0  # the first tokens, and those with nothing behind them
    assert (counts[43:46] == 400).all()
    for candidates, p in ((counts[1:41], 6 / 40), (counts[48:60], 6 / 12)):  # uniform inside a document
        np.testing.assert_allclose(candidates, 400 * p, atol=5 * np.sqrt(400 * p * (1 - p)))


def test_one_document_a_row_has_the_anchors_it_has_without_numbers():
    mask = jnp.asarray(np.random.default_rng(0).random((3, 30)) < 0.6).at[2].set(False)
    whole = jnp.zeros(mask.shape, jnp.int32)
    for count in (4, 40):
        draw = jax.jit(functools.partial(anchors_lib.sample_anchors, count=count))
        alone, numbered = (draw(jax.random.key(1), mask, documents=numbers) for numbers in (None, whole))
        jax.tree.map(np.testing.assert_array_equal, alone, numbered)
        _, keep = alone
        assert keep.any(axis=-1).tolist() == [True, True, False]


def test_blocks_never_cross_documents():
    """With every token of every document supervised, also the first ones, which a mask should not have."""
    _, drafter, batch, _ = setting(())
    batch = batch | {"loss_mask": jnp.ones(batch["tokens"].shape)}
    numbers, T = np.asarray(batch["documents"]), drafter.config.block_length
    sample = jax.jit(objective.sample_blocks, static_argnums=(0, 4))
    blocks = jax.device_get(sample(drafter.config, batch, loop.inverse(None, 48), jax.random.key(0), 60))
    ends = 0
    for b, n in np.argwhere(blocks["keep"]):
        anchor = blocks["anchors"][b, n]
        own = numbers[b, anchor + 1:anchor + 1 + T] == numbers[b, anchor]
        own = np.pad(own, (0, T - len(own)))
        assert own[0] and blocks["mask"][b, n].tolist() == own.tolist()
        ends += not own.all()
    assert ends > 5


# ----------------------------------------------------------------------------------- packed and unpacked are the same


LENGTHS, ROW = (13, 7, 22, 2, 9, 16, 30), 40
ROWS = [[0, 1, 3, 5], [6, 4], [2]]  # documents of the packed rows: one row is full but for two places
ANCHORS = 6  # of each document


@functools.cache
def setting(attention, **fields):
    """(target, drafter, a packed batch, the same documents one a row)."""
    target = pairs.random_target()
    layers = max(1, len(attention))
    backbone = BackboneConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, conv_kernel_size=fields.pop("conv", 0), conv_group_size=8, attention=attention)
    drafter = pairs.random_drafter(target, backbone=backbone, confidence=True, **fields)
    rng = np.random.default_rng(0)
    documents = Documents.pack([(rng.integers(0, 48, n), np.arange(n) > n // 4, "") for n in LENGTHS])
    packed, single = ({name: jnp.asarray(a) for name, a in batches.assemble(documents, None, chosen, ROW, 30).items()
                       if a is not None} for chosen in (ROWS, np.arange(len(LENGTHS))))
    assert "documents" in packed and "documents" not in single
    return target, drafter, packed, single


def places():
    """(row, document, where it begins in the row) of each document of `ROWS`."""
    return [(b, i, sum(LENGTHS[before] for before in row[:n])) for b, row in enumerate(ROWS) for n, i in enumerate(row)]


def same_anchors():
    """The anchors of `setting` in both forms: ((anchors, keep) packed, (anchors, keep) one document a row)."""
    rng = np.random.default_rng(1)
    single, single_keep = np.zeros((2, len(LENGTHS), ANCHORS), np.int32)
    packed, packed_keep = np.zeros((2, len(ROWS), ANCHORS * 4), np.int32)
    for i, n in enumerate(LENGTHS):
        chosen = np.sort(rng.permutation(np.arange(n // 4 + 1, n - 1))[:ANCHORS])
        single[i, :len(chosen)], single_keep[i, :len(chosen)] = chosen, 1
    for b, _ in enumerate(ROWS):
        found = np.concatenate([begin + single[i][single_keep[i] > 0] for row, i, begin in places() if row == b])
        packed[b, :len(found)], packed_keep[b, :len(found)] = found, 1
    assert single_keep.sum() == packed_keep.sum() > 25
    return (packed, packed_keep > 0), (single, single_keep > 0)


@pytest.mark.parametrize("attention, fields", [
    ((), {}),
    ((Attention(window=5, causal=True), Attention(window=9)),
     {"layout": "fill_in", "conv": 2, "transition": "context"}),
], ids=["plain", "window-convolution"])
def test_packed_training_equals_unpacked(attention, fields):
    """Loss and every gradient, from the same anchors and the same features, as cached ones are."""
    _, drafter, packed, single = setting(attention, **fields)
    weights = LossWeights(ce=0.3, l1=0.9, confidence=0.5)
    of_documents = np.random.default_rng(2).normal(size=(*single["tokens"].shape, 96)).astype(np.float32)
    of_rows = np.zeros((*packed["tokens"].shape, 96), np.float32)
    for b, i, begin in places():
        of_rows[b, begin:begin + LENGTHS[i]] = of_documents[i, :LENGTHS[i]]
    both = packed | {"features": jnp.asarray(of_rows)}, single | {"features": jnp.asarray(of_documents)}
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "target_head": None,
              "target_to_draft": loop.inverse(None, 48), "draft_to_target": None}
    results = []
    for batch, anchors in zip(both, same_anchors()):
        blocks = objective.blocks_at(drafter.config, batch, frozen["target_to_draft"], *map(jnp.asarray, anchors))
        denominators = loss_denominators(weights, blocks["mask"], blocks["reached"])

        @jax.jit
        @jax.value_and_grad
        def loss(params):
            return objective.batch_loss(
                drafter.config, weights, params, frozen, batch, blocks, weights.at(0), denominators, 5)[0]

        results.append(loss(drafter.params))
    (packed_loss, packed_gradient), (loss, gradient) = results
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(packed_gradient), jax.tree.leaves(gradient)):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=str(path))


def test_target_sees_one_document():
    """Hidden states in a packed row are those of each document by itself, and they are what a step online uses."""
    target, _, packed, single = setting(())
    online = objective.with_features(packed, {"target": target.params}, (target.config, (1,)))["features"]
    hidden, tapped = target_lib.forward(target.config, target.params, packed["tokens"], (1,), packed["documents"])
    alone, alone_tapped = target_lib.forward(target.config, target.params, single["tokens"], (1,))
    np.testing.assert_array_equal(online, jnp.concatenate([*tapped, hidden], axis=-1).astype(online.dtype))
    for b, i, begin in places():
        for of_row, of_document in ((hidden, alone), (tapped[0], alone_tapped[0])):
            close(np.asarray(of_row)[b, begin:begin + LENGTHS[i]], np.asarray(of_document)[i, :LENGTHS[i]], 1e-5)


# ------------------------------------------------------------------------------------------------------------- batches


def test_packed_batches():
    rng = np.random.default_rng(0)
    lengths, weights = rng.integers(2, 65, 300), rng.choice([0.0, 1.0, 2.0], 300)
    rows = [batches.choose_packed(lengths, weights, 4, 256, 5, step) for step in range(200)]
    assert rows == [batches.choose_packed(lengths, weights, 4, 256, 5, step) for step in range(200)]
    assert rows[:9] != [batches.choose_packed(lengths, weights, 4, 256, 6, step) for step in range(9)]
    filled = []
    for row in rows:
        together = [i for documents in row for i in documents]
        assert len(row) == 4 and len(set(together)) == len(together) and all(weights[i] for i in together)
        assert all(0 < sum(lengths[i] for i in documents) <= 256 for documents in row)
        filled.append(sum(lengths[i] for i in together) / 1024)
    assert np.mean(filled) > 0.93
    # The first document drawn is drawn as `choose` does, and few that are drawn do not fit.
    times = np.bincount(np.concatenate([i for row in rows for i in row]), minlength=300)
    heavy, light = (times[(weights == w) & (lengths > 30)].mean() for w in (2, 1))
    assert 1.4 < heavy / light < 2


def test_as_many_rows_as_documents():
    assert sorted(batches.choose_packed([9, 2, 9], np.array([1.0, 1, 1]), 3, 9, 0, 0)) == [[0], [1], [2]]
    assert sorted(sum(batches.choose_packed([3, 2, 4], np.array([1.0, 0, 1]), 1, 50, 0, 0), [])) == [0, 2]


def test_assemble_packed():
    documents = Documents.pack([([1, 2, 3], [0, 1, 1], ""), ([4, 5], [0, 1], ""), ([6, 7, 8, 9], [0, 0, 1, 1], "")])
    stored = lambda i: (np.full((len(documents.document(i)[0]), 2), i + 1.0), np.full(len(documents.document(i)[0]), i + 0.5))
    batch = batches.assemble(documents, stored, [[2, 1], [0]], 7, 3)
    assert batch["tokens"].tolist() == [[6, 7, 8, 4, 5, 0, 0], [1, 2, 3, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]]
    assert batch["documents"].tolist() == [[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert batch["features"][..., 0].tolist() == [[3, 3, 3, 2, 2, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert batch["log_normalizers"].tolist() == [[2.5] * 3 + [1.5] * 2 + [0, 0], [0.5] * 3 + [0] * 4]
