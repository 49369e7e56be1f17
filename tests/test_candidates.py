"""The best tokens of a row, exact or nearly, on one device and on several, against sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import slow
from dspark_jax import candidates
from dspark_jax.candidates import CHUNK, top_candidates


def rows(V, *leading):
    """Five kinds of logits [5, ..., V]: smooth, many ties, infinities, almost all of them -inf, all equal."""
    rng, shape = np.random.default_rng(V), (*leading, V)
    few = np.full(shape, -np.inf)  # fewer finite values than candidates: padding must not be chosen
    few[..., V // 2] = 1.0
    ends = np.where(rng.random(shape) < 0.5, -np.inf, np.where(rng.random(shape) < 0.5, np.inf, 0.0))
    kinds = rng.normal(size=shape), rng.integers(0, 3, size=shape), ends, few, np.zeros(shape)
    return np.stack(kinds).astype(np.float32)


def sorted_ids(logits, M):
    return np.apply_along_axis(lambda row: slow.top(row, M), -1, logits)


# One stage and several, both sides of the change from one to the other, padded and not.
SIZES = [(1, 1), (5, 5), (CHUNK, 1), (CHUNK + 1, 1), (3 * CHUNK, 2), (3 * CHUNK + 1, 2)]
SIZES += [(1000, 3), (1025, 16), (40 * CHUNK - 1, 16), (CHUNK**2 + 1, 1), (2 * CHUNK**2 + 3, 2)]


@pytest.mark.parametrize("V, M", SIZES)
def test_top_candidates_against_sorting(V, M):
    logits = rows(V, 2)
    ids, scores = jax.jit(lambda x: top_candidates(x, M))(logits)
    expected = sorted_ids(logits, M)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(scores, np.take_along_axis(logits, expected, axis=-1))
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(top_candidates(logits[1, 0], M)[0], expected[1, 0])  # one row, no leading axis


def test_approximate_candidates():
    """On this machine exact; the M best, best first, and as many as asked for."""
    logits = np.random.default_rng(0).normal(size=(3, 2, 1000)).astype(np.float32)
    ids, scores = candidates.approximate_candidates(logits, 5)
    assert ids.shape == scores.shape == (3, 2, 5) and ids.dtype == jnp.int32
    np.testing.assert_array_equal(scores, np.take_along_axis(logits, np.asarray(ids), axis=-1))
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(ids, sorted_ids(logits, 5))


@functools.cache
def mesh(data, tensor):
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("data, tensor", [(1, 8), (2, 4)])
@pytest.mark.parametrize("V, M", [(16, 16), (16, 3), (16, 1), (8 * CHUNK, 2), (24 * CHUNK, 2), (24 * CHUNK, 16)])
def test_sharded_candidates_are_the_unsharded(V, M, data, tensor):
    """Also where there are more candidates than tokens on a shard, and where equal scores lie on different shards."""
    logits = rows(V, 2, 3)
    laid = jax.device_put(logits, jax.NamedSharding(mesh(data, tensor), jax.P(None, "data", None, "tensor")))
    ids, scores = jax.jit(lambda x: candidates.over_mesh(mesh(data, tensor), "tensor")(x, M))(laid)
    expected = sorted_ids(logits, M)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(scores, np.take_along_axis(logits, expected, axis=-1))
    assert ids.dtype == jnp.int32


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_sharded_candidates_travel_alone():
    """Between the devices go M ids and scores a shard, not logits; also under vmap, as in drafting."""
    V, M, B, T = 8 * 1024, 4, 2, 3
    choose = candidates.over_mesh(mesh(1, 8), "tensor")
    laid = jax.NamedSharding(mesh(1, 8), jax.P(None, None, "tensor"))
    logits = jax.ShapeDtypeStruct((B, T, V), jnp.float32, sharding=laid)
    for f in (lambda x: choose(x, M), jax.vmap(lambda x: choose(x, M))):
        program = jax.jit(f).lower(logits).compile().as_text()
        gathered = [line for line in program.splitlines() if "all-gather(" in line or "all-gather-start(" in line]
        assert gathered and "all-to-all" not in program and "collective-permute" not in program
        assert all(f"{B},{T},{8 * M}]" in line for line in gathered), gathered


@pytest.mark.parametrize("M", [6, 0])
def test_more_candidates_than_tokens(M):
    message = f"M: got {M} candidates from a vocabulary of V = "
    for choose in (top_candidates, candidates.approximate_candidates):
        with pytest.raises(ValueError, match=f"{message}5"):
            choose(jnp.zeros(5), M)
    if jax.device_count() >= 8 and M == 0:
        with pytest.raises(ValueError, match=f"{message}16"):
            candidates.over_mesh(mesh(1, 8), "tensor")(jnp.zeros(16), M)
