"""Sums over anchors, a few at a time: value, gradient and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import chunks
from golden import close

B, N, T, D, V = 2, 7, 3, 4, 5


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    shared = {"table": normal(V, D), "unused": normal(3)}
    rows = {"hidden": normal(B, N, T, D), "scale": normal(B, N), "none": None}
    fixed = {"scale": 1.5, "ids": jnp.arange(V)}
    fixed_rows = {"labels": rng.integers(0, V, (B, N, T)), "mask": rng.integers(0, 2, (B, N, T)).astype(bool)}
    return shared, rows, fixed, fixed_rows


def f(shared, rows, fixed, fixed_rows):
    """Something with every kind of argument, that is not linear in any."""
    z = rows["hidden"] @ shared["table"].T * (1 + rows["scale"][..., None, None] ** 2)
    chosen = fixed["ids"] == fixed_rows["labels"][..., None]
    ce = jax.nn.logsumexp(z, axis=-1) - jnp.sum(jnp.where(chosen, z, 0), axis=-1)
    loss = fixed["scale"] * jnp.sum(jnp.where(fixed_rows["mask"], ce, 0))
    return loss, {"count": jnp.sum(fixed_rows["mask"], axis=(0, 1)), "best": jnp.sum(fixed_rows["mask"] * z.max(-1))}


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_chunks_are_the_whole(size):
    shared, rows, fixed, fixed_rows = inputs()

    def of(run):  # a function of the sum, so that what comes down to the sum is not 1
        def g(shared, rows):
            loss, sums = run(shared, rows)
            return jnp.sin(loss / 50), sums
        return jax.value_and_grad(g, (0, 1), has_aux=True)

    chunked = lambda shared, rows: chunks.sum_in_chunks(f, size, shared, rows, fixed, fixed_rows)
    whole = lambda shared, rows: f(shared, rows, fixed, fixed_rows)
    same = lambda a, b: jax.tree.map(lambda a, b: close(a, b, 1e-6), a, b)
    same(jax.jit(of(chunked))(shared, rows), of(whole)(shared, rows))
    same(jax.jit(chunked)(shared, rows), whole(shared, rows))


def test_gradients_have_the_dtype_of_what_they_are_by():
    shared, rows, fixed, fixed_rows = inputs()
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (shared, rows))
    gradient = jax.grad(lambda x: chunks.sum_in_chunks(f, 2, *x, fixed, fixed_rows)[0])(low)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}


def test_accumulate():
    x, y = np.arange(6.0).reshape(3, 2), np.ones((3, 2))
    added, stacked = chunks.accumulate(lambda x, y: ({"sum": x @ y}, x + 1), x, y)
    close(added["sum"], 15)
    close(stacked, x + 1)


def test_anchors_per_chunk():
    """As few chunks as the budget allows, of like size."""
    one = 4 * 7 * 151936
    most = chunks.CHUNK_BYTES // one
    for anchors in (1, most, most + 1, 512, 97):
        size = chunks.anchors_per_chunk(1, anchors, 7, 151936)
        count = -(-anchors // size)
        assert 1 <= size <= most and count == -(-anchors // most) and (size - 1) * count < anchors
    assert chunks.anchors_per_chunk(4, 512, 7, 151936) <= most // 4
    assert chunks.anchors_per_chunk(10**6, 8, 7, 151936) == 1
