"""From logits to probabilities to tokens.

The probabilities that a draft is drawn from are the ones it is verified with, so both come from one call of
`probabilities`, in float32.

Shape letters: V vocabulary; "..." any leading axes.
"""

import math
import numbers

import jax
import jax.numpy as jnp

from dspark_jax.candidates import top_candidates


def check_sampling(temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
    """Raises ValueError naming the field and what is allowed, for sampling settings given as Python numbers."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature: got {temperature}; allowed: finite numbers >= 0, 0 for greedy decoding")
    if not isinstance(top_k, numbers.Integral) or top_k < 0:
        raise ValueError(f"top_k: got {top_k}; allowed: whole numbers >= 0, 0 for no limit")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}; allowed: 0 < top_p <= 1, 1 for no limit")


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
