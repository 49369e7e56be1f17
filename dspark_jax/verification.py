"""Which drafts the target keeps, and what it says instead: rules under which the output law is the target's, exactly.

Drafts x_1..x_T were drawn from q_1..q_T; the target's law of the token after the first i of them is p_{i+1}. A rule
keeps the first i drafts and gives them a weight w. The next token comes from the residual relu(w p_{i+1} - q_{i+1}),
normalised over the whole vocabulary, or from p_{i+1} itself where there was no further draft to reject.

Token rule. Accept x_i iff u_i q_i(x_i) < p_i(x_i) for a uniform u_i; stop at the first rejection; w = 1.

Block rule (Sun et al., 2024, "Block Verification Accelerates Speculative Decoding"). The drafts are judged as prefixes:

    w_0 = 1      w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1)
    S_i = sum_x relu(w_i p_{i+1}(x) - q_{i+1}(x)) = w_i - m_i      m_i = sum_x min(w_i p_{i+1}(x), q_{i+1}(x))
    h_i = S_i / (S_i + 1 - w_i) for i < n      h_n = w_n      with n the drafts put to verification

Keep the longest prefix with u_i < h_i, the empty one if there is no other. Why that is exact: given x_1..x_i, the
chance to keep more than i drafts is, by induction from the end, the mean of w_{i+1}, that is m_i; so the chance to keep
at least i is m_i + (1 - m_i) h_i = w_i. To keep just i has the chance (1 - m_i) h_i = S_i, and its residual then makes
each next token as likely as the target has it: min(w_i p, q) + relu(w_i p - q) = w_i p. The token rule's chance to keep
i drafts is the product of the min(p / q, 1), never more than w_i.

How many drafts are put to verification may depend on the drafts as a stopping time does: whether x_{i+1} is among them
on x_1..x_i alone.

To add a rule, write a function with the signature of `accept_tokens` and enter it in `VERIFICATION`, bound to `verify`.

Shape letters: T draft positions, V target vocabulary, M candidates per position. One row; batch with jax.vmap. Arrays
count from 0: p[i] is the law after i drafts, q[i] the law that draft i + 1 was drawn from.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.sampling import draw


class SparseDraft(NamedTuple):
    """Draft laws that are zero outside a few tokens: ids int [T, M] of the target vocabulary, probabilities [T, M].

    A dense law on a smaller draft vocabulary is the same thing, with its map to target ids repeated as `ids`. An id may
    come twice in a row, but only once with a probability above 0.
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


def residual(p: jax.Array, q: jax.Array, weight: jax.Array | float = 1.0) -> jax.Array:
    """relu(weight * p - q) normalised to sum 1, and p itself where nothing is left: two [V], weight [] -> [V]."""
    excess = jnp.maximum(weight * p - q, 0)
    mass = jnp.sum(excess)
    return jnp.where(mass > 0, excess / jnp.where(mass > 0, mass, 1), p)


def next_distribution(
    p: jax.Array,
    q: Draft,
    accepted: jax.Array,
    proposed: jax.Array | int | None = None,
    weight: jax.Array | float = 1.0,
) -> jax.Array:
    """Law of the token after the accepted prefix: [V].

    The residual of the rejected draft or, where all `proposed` (None: T) drafts were accepted, the target's own law.
    p: [T+1, V], the last row for the position after all drafts; q: T laws; accepted: int []; weight: of the prefix.
    """
    T = p.shape[0] - 1
    row = full_row(q, jnp.minimum(accepted, T - 1), p.shape[-1])
    all_accepted = accepted >= (T if proposed is None else proposed)
    return jnp.where(all_accepted, p[accepted], residual(p[accepted], row, weight))


def _at_drafts(p, tokens, q):
    """p_i(x_i) and q_i(x_i): two [T]."""
    return jnp.take_along_axis(p[:-1], tokens[:, None], axis=-1)[:, 0], token_probabilities(q, tokens)


def accept_tokens(
    uniforms: jax.Array, p: jax.Array, tokens: jax.Array, q: Draft, proposed: jax.Array | int | None = None
) -> tuple[jax.Array, jax.Array | float]:
    """The token rule: how many drafts are kept, int32 [], and the weight of that prefix.

    uniforms in [0, 1): [T]; the other arguments as in `verify`.
    """
    return accepted_length(uniforms, *_at_drafts(p, tokens, q), proposed), 1.0


def prefix_weights(p_tokens: jax.Array, q_tokens: jax.Array) -> jax.Array:
    """The w_i of the block rule, i = 0..T: p_i(x_i) and q_i(x_i), two [T] -> [T+1]."""

    def step(weight, inputs):
        p, q = inputs
        joint = weight * p
        # Written so that nothing divides by 0, and a token that the target never says has weight 0 whatever its q.
        weight = jnp.where(joint < q, joint / jnp.where(q > 0, q, 1), jnp.where(joint > 0, 1.0, 0.0))
        return weight, weight

    one = jnp.ones((), jnp.result_type(p_tokens, q_tokens))
    return jnp.concatenate([one[None], jax.lax.scan(step, one, (p_tokens, q_tokens))[1]])


def overlap(p: jax.Array, q: Draft, weights: jax.Array) -> jax.Array:
    """The m_i of the block rule, i = 0..T-1: p [T, V], q of T laws, weights [T] -> [T]. Of a sparse q it costs T M."""
    if isinstance(q, SparseDraft):
        p, q = jnp.take_along_axis(p, q.ids, axis=-1), q.probabilities
    return jnp.sum(jnp.minimum(weights[:, None] * p, q), axis=-1)


def prefix_chances(p: jax.Array, q: Draft, weights: jax.Array, proposed: jax.Array | int | None = None) -> jax.Array:
    """The h_i of the block rule, i = 0..T, 0 for i > n: p [T+1, V], q of T laws, weights [T+1] -> [T+1]."""
    T = p.shape[0] - 1
    left = jnp.maximum(weights[:-1] - overlap(p[:-1], q, weights[:-1]), 0)
    total = left + (1 - weights[:-1])
    # 0/0: the target and the drafter agree on all of it, so what follows is accepted anyway.
    inner = jnp.where(total > 0, left / jnp.where(total > 0, total, 1), 1)
    last, length = T if proposed is None else proposed, jnp.arange(T + 1)
    return jnp.where(length < last, jnp.append(inner, 0), jnp.where(length == last, weights, 0))


def accept_block(
    uniforms: jax.Array, p: jax.Array, tokens: jax.Array, q: Draft, proposed: jax.Array | int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The block rule: how many drafts are kept, int32 [], and their weight. Arguments as in `accept_tokens`."""
    weights = prefix_weights(*_at_drafts(p, tokens, q))
    chances = prefix_chances(p, q, weights, proposed)[1:]
    length = jnp.arange(1, tokens.shape[0] + 1, dtype=jnp.int32)
    accepted = jnp.max(jnp.where(uniforms < chances, length, 0))
    return accepted, weights[accepted]


def verify(
    accept: Callable,
    key: jax.Array,
    p: jax.Array,
    tokens: jax.Array,
    q: Draft,
    proposed: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One block under a rule.

    Args:
      accept: the rule, `accept_tokens` or `accept_block`.
      key: a PRNG key.
      p: float32 [T+1, V], the target's laws after the anchor and after each draft.
      tokens: int [T], the drafts.
      q: the laws they were drawn from, `SparseDraft` or dense [T, V].
      proposed: int [], only the first so many drafts are put to verification; None: all.

    Returns: accepted int32 [], next token int32 [].
    """
    accept_key, next_key = jax.random.split(key)
    accepted, weight = accept(jax.random.uniform(accept_key, tokens.shape), p, tokens, q, proposed)
    return accepted, draw(next_key, next_distribution(p, q, accepted, proposed, weight))


verify_tokens = functools.partial(verify, accept_tokens)
verify_block = functools.partial(verify, accept_block)

VERIFICATION: dict[str, Callable] = {"token": verify_tokens, "block": verify_block}


def get_verification(name: str) -> Callable:
    """`VERIFICATION[name]`; raises ValueError that lists the known names."""
    if name not in VERIFICATION:
        raise ValueError(f"verification: unknown name {name!r}; allowed: {', '.join(VERIFICATION)}")
    return VERIFICATION[name]
