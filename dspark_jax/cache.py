"""A static-shape key/value cache: one (key, value) pair [B, K, S, C] a layer, written in place when donated.

A tuple of arrays, one pair a layer, and not one stacked array: a scan over a stacked cache copies it at every step.
Heads come before positions: `layers.attend` multiplies the matrices [S, C] of the heads.
"""

import jax
import jax.numpy as jnp


def empty_cache(layers, batch, length, kv_heads, head_dim, dtype=jnp.float32):
    """Zeros for ``layers`` pairs of [batch, kv_heads, length, head_dim]."""
    shape = (batch, kv_heads, length, head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def write(cache, new, start):
    """Put ``new`` [B, Q, K, C] into ``cache`` [B, K, S, C] at positions start[b] .. start[b]+Q-1.

    start int32 [B]. The caller keeps start + Q <= S: a larger start would be moved back silently.
    """
    new = new.swapaxes(1, 2).astype(cache.dtype)
    if cache.shape[0] == 1:  # a plain slice update: a batched one becomes a scatter
        return jax.lax.dynamic_update_slice(cache, new, (0, 0, start[0], 0))
    return jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice(c, n, (0, s, 0)))(cache, new, start)
