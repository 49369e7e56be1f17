"""A sum over many anchors, computed a few anchors at a time, forward and backward.

The logits of all drafts of a training batch, [B, N, T, V], are far larger than everything else in it: 512 anchors of 7
drafts over 151,936 tokens are 2.2 GB an array, and a loss and its gradient need half a dozen of them. The loss is a sum
over anchors of functions of small things (hidden states, labels), so it is computed chunk by chunk.

What differentiation of a loop would do costs either the memory again (it keeps the logits of every chunk for the way
back) or, with rematerialisation, a second computation of every chunk: 5 products with the vocabulary instead of 3. Here
the gradient of a chunk is computed together with its value, while its logits exist. The loss being a plain sum, all
that the way back has left to do is to scale these gradients by the one number that comes down to it. When nothing is
differentiated, no gradient is computed.

Shape letters: B batch, N anchors per sequence, T draft positions, V vocabulary.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspark_jax.divergences import wide

# Of one float32 array of logits [B, chunk, T, V]. On CPU larger ones are no faster. An accelerator reads the output table
# anew for every chunk and wants some hundred drafts for it: with one sequence a device, ask for 32 anchors or more.
CHUNK_BYTES = 64 << 20


def anchors_per_chunk(sequences: int, anchors: int, T: int, V: int) -> int:
    """How many of N anchors per sequence to take at a time: chunks of like size, of `CHUNK_BYTES` or one anchor.

    sequences: B of a device. V: the largest vocabulary over which logits are computed.
    """
    most = max(1, CHUNK_BYTES // (4 * sequences * T * V))
    chunks = -(-anchors // most)
    return -(-anchors // chunks)


def accumulate(f, *rows):
    """Scans f(*part) -> (added, stacked) over the leading axes of `rows`: the sum of the first, all of the second."""
    def step(total, part):
        added, stacked = f(*part)
        return jax.tree.map(jnp.add, total, added), stacked

    added, _ = jax.eval_shape(f, *jax.tree.map(lambda x: x[0], rows))
    return jax.lax.scan(step, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), added), rows)


def sum_in_chunks(f: Callable, size: int, shared, rows, fixed, fixed_rows):
    """(sum of losses, sums) over chunks of `size` anchors of f(shared, rows, fixed, fixed_rows) -> (loss [], sums).

    Args:
      f: a function of a chunk. `sums`: a tree of arrays, added up over chunks, with no gradient. Rows of zeros must add
        nothing: they fill up the last chunk.
      size: anchors per chunk.
      shared, rows: trees of float arrays that the loss is differentiated by. Leaves of `rows` are [B, N, ...].
      fixed, fixed_rows: trees of arrays of any dtype, without gradient. Leaves of `fixed_rows` are [B, N, ...].

    f must not close over anything that is differentiated. Only reverse-mode differentiation of first order is defined.
    """
    def split(x):  # [B, N, ...] -> [chunks, B, size, ...]: B stays whole, so that it stays where it is sharded
        count = -(-x.shape[1] // size)
        x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    return _sum(f, shared, jax.tree.map(split, rows), fixed, jax.tree.map(split, fixed_rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(f, shared, rows, fixed, fixed_rows):
    return accumulate(lambda rows, fixed_rows: (f(shared, rows, fixed, fixed_rows), None), rows, fixed_rows)[0]


def _forward(f, shared, rows, fixed, fixed_rows):
    gradient = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)

    def chunk(rows, fixed_rows):
        value, (by_shared, by_rows) = gradient(shared, rows, fixed, fixed_rows)
        return (value, jax.tree.map(wide, by_shared)), by_rows

    (value, by_shared), by_rows = accumulate(chunk, rows, fixed_rows)
    by_shared = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), by_shared, shared)
    return value, (by_shared, by_rows)


def _backward(f, gradients, cotangents):
    del f
    of_loss, _ = cotangents
    by_shared, by_rows = jax.tree.map(lambda gradient: (of_loss * gradient).astype(gradient.dtype), gradients)
    return by_shared, by_rows, None, None


_sum.defvjp(_forward, _backward)
