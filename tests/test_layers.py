"""Layers whose form depends on the machine: the same function in each."""

import jax
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
