"""The M best tokens of a row of logits: exact, over a vocabulary spread on a mesh axis, and nearly exact for TPU.

All have one signature, logits [..., V] and M to ids int32 [..., M] and scores [..., M], best first. A drafter may use
any: drafts are verified with the law they were drawn from, a law over whatever candidates there were.

Shape letters: V vocabulary, M candidates; "..." any leading axes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Width of the pieces in `top_candidates`. On CPU, V = 151,936, M = 16: 32 and 64 do equally well, 16 and 128 are slower.
CHUNK = 64

Choice = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]
"""What the functions of this file are: (logits [..., V], M) -> ids int32 [..., M], scores [..., M]."""


def _check(M, V):
    if not 1 <= M <= V:
        raise ValueError(f"M: got {M} candidates from a vocabulary of V = {V}; allowed: 1 <= M <= V")


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    # Without a barrier XLA on CPU merges the top-k with its neighbours in a larger jit and falls back to a full sort.
    # One barrier for each result, since one around both makes XLA on CPU end the process inside of a shard_map (jaxlib
    # 0.10.2: "optimization_barrier ... cannot be downcasted to HloGetTupleElementInstruction").
    return tuple(map(jax.lax.optimization_barrier, jax.lax.top_k(x, k)))


def top_candidates(logits: jax.Array, M: int) -> tuple[jax.Array, jax.Array]:
    """The M best tokens, best first, equal scores by smaller id: [..., V] -> ids int32 [..., M], scores [..., M].

    Exact, and the logits are read once: the M best tokens lie in the M chunks of ids with the best maxima, which are found
    among all maxima in the same way.
    For ties, order tokens by (score descending, id ascending). Chunks are contiguous, so ordering them by (maximum
    descending, index ascending), as `top_k` and this function do, is ordering them by their first token in that order; a
    token outside the first M chunks therefore has M tokens before it. The chosen chunks are put back in order of index, so
    that `top_k` over their union breaks ties by id again.

    Raises ValueError where M is not in 1..V.
    """
    *leading, V = logits.shape
    _check(M, V)
    flat = logits.reshape(-1, V)
    if V <= M * CHUNK:
        scores, ids = _top_k(flat, M)
        return ids.reshape(*leading, M), scores.reshape(*leading, M)
    flat = jnp.pad(flat, ((0, 0), (0, -V % CHUNK)), constant_values=-jnp.inf)  # ids >= V come last among equals
    chunks = flat.reshape(flat.shape[0], -1, CHUNK)
    best, _ = top_candidates(chunks.max(axis=-1), M)
    best = jnp.sort(best, axis=-1)
    union = jnp.take_along_axis(chunks, best[..., None], axis=1)  # [positions, M, CHUNK]
    scores, place = _top_k(union.reshape(-1, M * CHUNK), M)
    ids = jnp.take_along_axis(best, place // CHUNK, axis=-1) * CHUNK + place % CHUNK
    return ids.reshape(*leading, M), scores.reshape(*leading, M)


def approximate_candidates(logits: jax.Array, M: int) -> tuple[jax.Array, jax.Array]:
    """`top_candidates` by TPU's own partial reduction: one pass, at 95 % expected recall instead of all M.

    Exact, and slow, on other machines. Raises ValueError where M is not in 1..V.
    """
    _check(M, logits.shape[-1])
    scores, ids = jax.lax.approx_max_k(logits, M)
    return ids, scores


def sharded_candidates(logits: jax.Array, M: int, axis: str) -> tuple[jax.Array, jax.Array]:
    """`top_candidates` inside `jax.shard_map`, of a vocabulary laid out over a mesh axis: M candidates a shard travel.

    Every one of the M best tokens is among the M best of its shard. Shards hold ascending ids and are gathered in
    order, each sorted by (score descending, id ascending), so of equal scores the smaller id comes first in the
    gathered list too.

    Args:
      logits: [..., V / shards], this shard's part of the vocabulary.
      axis: name of that mesh axis.

    Returns: ids in the whole vocabulary, int32 [..., M], and scores [..., M], the same on every shard.
    Raises ValueError where M is not in 1..V.
    """
    width = logits.shape[-1]
    _check(M, width * jax.lax.axis_size(axis))
    ids, scores = top_candidates(logits, min(M, width))
    ids += width * jax.lax.axis_index(axis)
    ids, scores = (jax.lax.all_gather(x, axis, axis=-1, tiled=True) for x in (ids, scores))
    scores, place = jax.lax.top_k(scores, M)
    return jnp.take_along_axis(ids, place, axis=-1), scores


def over_mesh(mesh: jax.sharding.Mesh, axis: str, batch: str | tuple[str, ...] | None = None) -> Choice:
    """`sharded_candidates` as a function of whole logits, their last axis laid out over ``axis`` of ``mesh``.

    V must be a multiple of that axis's size. batch: what the first axis is laid out over, None for nothing. A batch that
    is mapped stays where it is laid out under ``jax.vmap(..., spmd_axis_name=those axes)``. The scores can be
    differentiated.
    """

    def choose(logits, M):
        laid = jax.P(*([batch] + [None] * logits.ndim)[:logits.ndim - 1], axis)
        # The candidates are the same on every shard, which is more than the checker of varying axes can see.
        return jax.shard_map(lambda x: sharded_candidates(x, M, axis), mesh=mesh, in_specs=laid,
                             out_specs=jax.P(batch), check_vma=False)(logits)

    return choose


def scores_at(mesh: jax.sharding.Mesh, axis: str, batch: tuple[str, ...] | None, logits: jax.Array,
              ids: jax.Array) -> jax.Array:
    """logits[..., ids], [..., V] and int [..., M] -> [..., M], of logits laid out as in `over_mesh`.

    Each shard looks up the ids that it holds, and the others' are added: M numbers travel.
    """
    def look_up(x, ids):
        here = ids - x.shape[-1] * jax.lax.axis_index(axis)
        found = jnp.take_along_axis(x, jnp.clip(here, 0, x.shape[-1] - 1), axis=-1)
        return jax.lax.psum(jnp.where((here >= 0) & (here < x.shape[-1]), found, 0), axis)

    laid = jax.P(batch, *[None] * (logits.ndim - 2), axis)
    return jax.shard_map(look_up, mesh=mesh, in_specs=(laid, jax.P(batch)), out_specs=jax.P(batch))(logits, ids)
