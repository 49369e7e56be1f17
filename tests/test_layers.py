"""Layers whose form depends on the machine: the same function in each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers


@pytest.mark.parametrize("queries, keys", [(5, 9), (2 * layers.ROWS, 2 * layers.ROWS + 3), (layers.ROWS + 1, 40)])
def test_attention_by_rows_is_attention_by_columns(queries, keys):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    arguments = draw(2, queries, 6, 4), draw(2, 3, keys, 4), draw(2, 3, keys, 4), rng.random((2, queries, keys)) < 0.7
    rows, columns = (jax.jit(f)(*arguments) for f in (layers.attend_by_rows, layers.attend_by_columns))
    np.testing.assert_allclose(rows, columns, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(layers.attend)(*arguments), columns)  # tests run on a CPU


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_sixteen_bit_products_are_summed_in_float32_and_have_gradients(shape, dtype):
    """Against float32 products of the same 16-bit numbers: equal but for the last rounding, forward and backward."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, [shape, (7, 5)]))
    into = jax.random.normal(keys[2], (*shape[:-1], 7)).astype(jnp.bfloat16).astype(jnp.float32)
    by_hand = lambda x, weight: jnp.einsum("...i,oi->...o", x, weight)
    y = layers.linear(x, weight, dtype)
    assert y.dtype == (dtype or jnp.bfloat16)
    np.testing.assert_allclose(y.astype(jnp.float32), by_hand(*map(jnp.float32, (x, weight))),
                               rtol=1e-6 if dtype else 2**-8, atol=1e-6)
    loss = lambda product: lambda x, weight: jnp.sum(into * product(x, weight).astype(jnp.float32))
    found = jax.grad(loss(lambda x, weight: layers.linear(x, weight, dtype)), (0, 1))(x, weight)
    expected = jax.grad(loss(by_hand), (0, 1))(*map(jnp.float32, (x, weight)))
    for one, other in zip(found, expected):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2**-8, atol=1e-6)


def test_many_small_numbers_are_not_lost_in_a_sixteen_bit_sum():
    """4,096 times 1/256: a sum in bfloat16 would stop growing at 1 or 2."""
    x = jnp.full((3, 4096), 1 / 16, jnp.bfloat16)
    np.testing.assert_array_equal(layers.linear(x, x), np.full((3, 3), 16.0))
