"""From logits to probabilities to tokens, and the exact choice of the best candidates.

The probabilities that a draft is drawn from are the ones it is verified with, so both come from one call of
`probabilities`, in float32.

Shape letters: V vocabulary, M candidates; "..." any leading axes.
"""

import math
import numbers

import jax
import jax.numpy as jnp

# Width of the pieces in `top_candidates`. Measured on CPU, V = 151,936, M = 16: 32 to 128 do equally well, 256 is slower.
CHUNK = 64


def check_sampling(temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
    """Raises ValueError naming the field and what is allowed, for sampling settings given as Python numbers."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature: got {temperature}; allowed: finite numbers >= 0, 0 for greedy decoding")
    if not isinstance(top_k, numbers.Integral) or top_k < 0:
        raise ValueError(f"top_k: got {top_k}; allowed: whole numbers >= 0, 0 for no limit")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}; allowed: 0 < top_p <= 1, 1 for no limit")


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    # Without the barrier XLA on CPU merges the top-k with its neighbours in a larger jit and falls back to a full sort.
    return jax.lax.optimization_barrier(jax.lax.top_k(x, k))


def top_candidates(logits: jax.Array, M: int) -> tuple[jax.Array, jax.Array]:
    """The M best tokens, best first, equal scores by smaller id: [..., V] -> ids int32 [..., M], scores [..., M].

    Exact, in two stages that read the logits once: the M best tokens lie in the M chunks of ids with the best maxima. For
    ties, order tokens by (score descending, id ascending). Chunks are contiguous, so ordering them by (maximum descending,
    index ascending), as `top_k` does, is ordering them by their first token in that order; a token outside the first M
    chunks therefore has M tokens before it. The chosen chunks are put back in order of index, so that `top_k` over their
    union breaks ties by id again.

    Raises ValueError where M is not in 1..V.
    """
    *leading, V = logits.shape
    if not 1 <= M <= V:
        raise ValueError(f"M: got {M} candidates from a vocabulary of V = {V}; allowed: 1 <= M <= V")
    flat = logits.reshape(-1, V)
    if V <= M * CHUNK:
        scores, ids = _top_k(flat, M)
        return ids.reshape(*leading, M), scores.reshape(*leading, M)
    flat = jnp.pad(flat, ((0, 0), (0, -V % CHUNK)), constant_values=-jnp.inf)  # ids >= V come last among equals
    chunks = flat.reshape(flat.shape[0], -1, CHUNK)
    _, best = _top_k(chunks.max(axis=-1), M)
    best = jnp.sort(best, axis=-1)
    union = jnp.take_along_axis(chunks, best[..., None], axis=1)  # [positions, M, CHUNK]
    scores, place = _top_k(union.reshape(-1, M * CHUNK), M)
    ids = jnp.take_along_axis(best, place // CHUNK, axis=-1) * CHUNK + place % CHUNK
    return ids.reshape(*leading, M), scores.reshape(*leading, M)


def probabilities(logits: jax.Array, temperature: jax.Array | float, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """The law a token is drawn from: [..., V] -> float32 [..., V], rows summing to 1.

    Divide by the temperature, keep the top_k best logits, take their softmax, keep the tokens before which (best first)
    less than top_p of the probability lies, renormalise. The best token always stays; of equal logits the smaller id does.

    Args:
      logits: [..., V], any float dtype; -inf for tokens that must not be drawn.
      temperature: scalar or [...], may be traced. 0: all probability on the best token, the smaller id of equal ones.
      top_k: Python int, 0 (or >= V) for no limit.
      top_p: Python float in (0, 1], 1 for no limit.
    """
    V = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    temperature = jnp.asarray(temperature, jnp.float32)[..., None]
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), V, dtype=jnp.float32)
    # Relative to the best logit no temperature can overflow; a temperature of 0 must not divide either.
    relative = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = relative / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    kept = min(top_k, V) if top_k > 0 else V
    if kept == V and top_p >= 1:
        sampled = jax.nn.softmax(scaled, axis=-1)
    else:
        ids, best = top_candidates(scaled, kept)
        p = jax.nn.softmax(best, axis=-1)
        if top_p < 1:  # the running sum may round to 1 before the last token
            before = jnp.cumsum(p, axis=-1) - p
            p = jnp.where(before < top_p, p, 0.0)
            p = p / jnp.sum(p, axis=-1, keepdims=True)
        sampled = jnp.put_along_axis(jnp.zeros_like(scaled), ids, p, axis=-1, inplace=False)
    return jnp.where(temperature > 0, sampled, greedy)


def draw(key: jax.Array, probabilities: jax.Array) -> jax.Array:
    """One token per row, float [..., V] -> int32 [...]: the first token where the running sum passes u * total, u uniform.

    One random number per row; Gumbel noise would take V of them. A parallel running sum need not be monotone to the last
    bit, so tokens of probability 0 are ruled out by themselves and can never be drawn.
    """
    cumulative = jnp.cumsum(probabilities, axis=-1)
    u = jax.random.uniform(key, (*probabilities.shape[:-1], 1), probabilities.dtype)
    passed = cumulative > u * cumulative[..., -1:]
    rank = jnp.where(probabilities > 0, 1 + passed, 0)
    return jnp.argmax(rank, axis=-1).astype(jnp.int32)
