"""Which drafts the target keeps, and what it says instead: rules under which the output law is the target's, exactly.

Token rule. Draft x_t was drawn from q_t and the target's law there is p_t. Accept x_t iff u q_t(x_t) < p_t(x_t) for a
uniform u; stop at the first rejection and draw the next token from the residual relu(p_t - q_t), normalised over the
whole vocabulary. Where all drafts are accepted, the next token comes from the target's law after them.

A rule is a function with the signature of `verify_tokens` and an entry in `VERIFICATION`.

Shape letters: T draft positions, V target vocabulary, M candidates per position. One row; batch with jax.vmap.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.sampling import draw


class SparseDraft(NamedTuple):
    """Draft laws that are zero outside a few tokens: ids int [T, M] of the target vocabulary, probabilities [T, M].

    A dense law on a smaller draft vocabulary is the same thing, with its map to target ids repeated as `ids`.
    """

    ids: jax.Array
    probabilities: jax.Array


Draft = SparseDraft | jax.Array
"""The laws q of a block's drafts: a `SparseDraft`, or dense float32 [T, V]."""


def token_probabilities(q: Draft, tokens: jax.Array) -> jax.Array:
    """q_t(x_t) of the drafted tokens: int [T] -> [T]."""
    if isinstance(q, SparseDraft):
        return jnp.sum(jnp.where(q.ids == tokens[:, None], q.probabilities, 0), axis=-1)
    return jnp.take_along_axis(q, tokens[:, None], axis=-1)[:, 0]


def full_row(q: Draft, t: jax.Array, V: int) -> jax.Array:
    """q_t on the whole vocabulary: int [] -> [V]."""
    if isinstance(q, SparseDraft):
        return jnp.zeros(V, q.probabilities.dtype).at[q.ids[t]].add(q.probabilities[t])
    return q[t]


def accepted_length(
    uniforms: jax.Array, p_tokens: jax.Array, q_tokens: jax.Array, proposed: jax.Array | int | None = None
) -> jax.Array:
    """Length of the accepted prefix: the number of t before the first with u_t q_t(x_t) >= p_t(x_t).

    uniforms in [0, 1), p_tokens, q_tokens: [T]. proposed: int [], drafts put to verification, None for T. -> int32 [].
    The inequality is strict, so that a token the target gives no probability is rejected even by u = 0.
    """
    accept = uniforms * q_tokens < p_tokens
    if proposed is not None:
        accept &= jnp.arange(accept.shape[0]) < proposed
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32)))


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """relu(p - q) normalised to sum 1, and p itself where nothing is left: two [V] -> [V]."""
    excess = jnp.maximum(p - q, 0)
    mass = jnp.sum(excess)
    return jnp.where(mass > 0, excess / jnp.where(mass > 0, mass, 1), p)


def next_distribution(p: jax.Array, q: Draft, accepted: jax.Array, proposed: jax.Array | int | None = None) -> jax.Array:
    """Law of the token after the accepted prefix: [V].

    The residual of the rejected draft, or, where all `proposed` (None: T) drafts were accepted, the target's p[accepted].
    p: [T+1, V], the last row for the position after all drafts; q: T laws; accepted: int [].
    """
    T = p.shape[0] - 1
    row = full_row(q, jnp.minimum(accepted, T - 1), p.shape[-1])
    all_accepted = accepted >= (T if proposed is None else proposed)
    return jnp.where(all_accepted, p[accepted], residual(p[accepted], row))


def verify_tokens(
    key: jax.Array, p: jax.Array, tokens: jax.Array, q: Draft, proposed: jax.Array | int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The token rule for one block.

    Args:
      key: a PRNG key.
      p: float32 [T+1, V], the target's laws after the anchor and after each draft.
      tokens: int [T], the drafts.
      q: the laws they were drawn from, `SparseDraft` or dense [T, V].
      proposed: int [], only the first so many drafts are put to verification; None: all.

    Returns: accepted int32 [], next token int32 [].
    """
    accept_key, next_key = jax.random.split(key)
    p_tokens = jnp.take_along_axis(p[:-1], tokens[:, None], axis=-1)[:, 0]
    uniforms = jax.random.uniform(accept_key, tokens.shape)
    accepted = accepted_length(uniforms, p_tokens, token_probabilities(q, tokens), proposed)
    return accepted, draw(next_key, next_distribution(p, q, accepted, proposed))


VERIFICATION: dict[str, Callable] = {"token": verify_tokens}


def get_verification(name: str) -> Callable:
    """`VERIFICATION[name]`; raises ValueError that lists the known names."""
    if name not in VERIFICATION:
        raise ValueError(f"verification: unknown name {name!r}; allowed: {', '.join(VERIFICATION)}")
    return VERIFICATION[name]
