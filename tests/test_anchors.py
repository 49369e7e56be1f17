import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import anchors
from golden import load

Z = load("dspark/anchors")
T, MASK = int(Z["block_size"]), int(Z["mask_token_id"])


@pytest.mark.parametrize("case", list(Z["case_names"]))
def test_golden(case):
    z = {k.removeprefix(f"{case}."): jnp.asarray(v) for k, v in Z.items() if k.startswith(f"{case}.")}
    loss_mask, tokens, a, keep = z["loss_mask"], z["input_ids"], z["anchors"], z["block_keep_mask"]
    S = tokens.shape[1]
    flat = lambda x: x.reshape(1, -1)
    computed = {
        "candidate_mask": anchors.candidate_mask(loss_mask),
        "label_indices": anchors.label_indices(a, T),
        "safe_label_indices": anchors.safe_label_indices(a, keep, T, S),
        "target_ids": anchors.labels(tokens, a, keep, T),
        "prev_token_ids": anchors.predecessors(tokens, a, keep, T),
        "eval_mask": anchors.evaluation_mask(loss_mask, a, keep, T),
        "noise_token_ids": flat(anchors.block_tokens(tokens, a, keep, T, MASK)),
        "draft_position_ids": flat(anchors.block_positions(a, T)),
        "attention_mask": anchors.block_visibility(a, keep, S, T)[:, None],
    }
    inputs = {"loss_mask", "input_ids", "anchors", "block_keep_mask"}
    assert computed.keys() == z.keys() - inputs
    for name, value in computed.items():
        np.testing.assert_array_equal(value, z[name], err_msg=name)
        assert value.dtype == z[name].dtype, name


def test_golden_anchors_are_what_the_sampler_may_return():
    """Where there are no more candidates than places, all of them are taken and nothing is left to chance."""
    for case in Z["case_names"]:
        loss_mask, expected, keep = (Z[f"{case}.{k}"] for k in ("loss_mask", "anchors", "block_keep_mask"))
        count = int(Z[f"{case}.candidate_mask"].sum())
        a, k = anchors.sample_anchors(jax.random.key(0), loss_mask, expected.shape[1])
        np.testing.assert_array_equal(k, keep, err_msg=case)
        if count <= expected.shape[1]:
            np.testing.assert_array_equal(a, expected, err_msg=case)


@pytest.mark.parametrize("S, N", [(1, 3), (2, 3), (5, 8), (40, 6)])
def test_sampled_anchors(S, N):
    rng = np.random.default_rng(S)
    loss_mask = (rng.random((4, S)) < 0.7).astype(np.float32)
    a, keep = jax.jit(anchors.sample_anchors, static_argnums=2)(jax.random.key(S), loss_mask, N)
    assert a.shape == keep.shape == (4, N) and a.dtype == jnp.int32 and keep.dtype == bool
    for row, kept, mask in zip(np.asarray(a), np.asarray(keep), loss_mask):
        allowed = [i for i in range(S - 1) if mask[i] > 0.5 and mask[i + 1] > 0.5]
        chosen = row[kept]
        assert len(chosen) == min(N, len(allowed))
        assert set(chosen) <= set(allowed) and list(chosen) == sorted(set(chosen))
        assert not row[~kept].any() and not (np.diff(kept.astype(int)) > 0).any()  # unused places: last, anchor 0


def test_sampling_is_uniform_over_subsets():
    """5 candidates, 2 places: 10 equally likely pairs. 20,000 draws, limit at 5 standard deviations."""
    loss_mask = jnp.zeros((20_000, 9)).at[:, jnp.array([0, 1, 2, 3, 5, 6, 7])].set(1)
    a, _ = anchors.sample_anchors(jax.random.key(3), loss_mask, 2)
    pairs, counts = np.unique(np.asarray(a), axis=0, return_counts=True)
    assert len(pairs) == 10 and set(pairs.ravel()) == {0, 1, 2, 5, 6}
    np.testing.assert_allclose(counts, 2000, atol=5 * np.sqrt(2000 * 0.9))


def test_loss_masks_count_as_true_above_one_half():
    as_bool = np.array([[True, True, False, True, True]])
    a, keep = jnp.array([[0, 3]]), jnp.array([[True, True]])
    for mask in (as_bool, as_bool.astype(np.uint8), np.where(as_bool, 0.6, 0.5).astype(np.float32)):
        np.testing.assert_array_equal(anchors.candidate_mask(mask), [[True, False, False, True]])
        np.testing.assert_array_equal(anchors.evaluation_mask(mask, a, keep, 2)[0], [[True, False], [True, False]])


def test_layouts_hold_the_same_drafts():
    """By hand: anchor at 2, T = 3. Draft t is token 3+t in both layouts, read from the last three slots."""
    tokens = jnp.arange(10, 20)[None]
    a, keep = jnp.array([[2, 0]]), jnp.array([[True, False]])
    np.testing.assert_array_equal(anchors.labels(tokens, a, keep, 3)[0, 0], [13, 14, 15])
    np.testing.assert_array_equal(anchors.predecessors(tokens, a, keep, 3)[0, 0], [12, 13, 14])
    np.testing.assert_array_equal(anchors.target_indices(a, keep, 3, 10)[0, 0], [2, 3, 4])
    for layout, J, offset in (("anchor_first", 3, 1), ("fill_in", 4, 0)):
        assert anchors.slots(layout, 3) == J
        block = anchors.block_tokens(tokens, a, keep, J, 99)[0]
        np.testing.assert_array_equal(block, [[12] + [99] * (J - 1), [99] * J])
        positions = anchors.block_positions(a, J)[0, 0]
        np.testing.assert_array_equal(positions, 2 + np.arange(J))
        # The slot of draft t predicts the position `offset` behind its own, and that is where the label is.
        np.testing.assert_array_equal(positions[-3:] + offset, anchors.label_indices(a, 3)[0, 0])


def test_unknown_layout():
    with pytest.raises(ValueError, match="layout: unknown name 'zlab'; allowed: anchor_first, fill_in"):
        anchors.slots("zlab", 7)


@pytest.mark.parametrize("J", [3, 4])
def test_visibility_against_loops(J):
    S, a, keep = 9, np.array([[0, 4, 8], [2, 5, 0]]), np.array([[True, True, True], [True, True, False]])
    B, N = a.shape
    expected = np.zeros((B, N * J, S + N * J), bool)
    for b in range(B):
        for n in range(N):
            for query in range(n * J, (n + 1) * J):
                for key in range(S + N * J):
                    if keep[b, n]:
                        own = n * J <= key - S < (n + 1) * J
                        expected[b, query, key] = key < a[b, n] if key < S else own
    np.testing.assert_array_equal(anchors.block_visibility(jnp.asarray(a), jnp.asarray(keep), S, J), expected)


def test_evaluation_mask_is_a_prefix():
    rng = np.random.default_rng(0)
    loss_mask = jnp.asarray(rng.random((8, 30)) < 0.8)
    a, keep = anchors.sample_anchors(jax.random.key(0), loss_mask, 6)
    mask = np.asarray(anchors.evaluation_mask(loss_mask, a, keep, 5))
    for b, n, t in np.ndindex(mask.shape):
        positions = a[b, n] + 1 + np.arange(t + 1)
        expected = keep[b, n] and all(p < 30 and loss_mask[b, p] for p in positions)
        assert mask[b, n, t] == expected
