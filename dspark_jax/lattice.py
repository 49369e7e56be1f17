"""Drafting on a lattice: a few candidates per position, every adjacent pair scored at once, then a walk.

The scores are those of `dspark_jax.sequential`, read at the candidates only. With M = V the two are the same draft.

Shape letters: T draft positions, M candidates per position, V target vocabulary, Vd draft vocabulary, D model width,
R rank. One block; batch with jax.vmap.
"""

import functools

import jax
import jax.numpy as jnp

from dspark_jax import copying
from dspark_jax.candidates import Choice, top_candidates
from dspark_jax.sampling import draw, probabilities
from dspark_jax.transitions import Params, Transition, embed, successor_rows, target_ids


def check_first_order(transition: Transition) -> None:
    """Raises ValueError for a transition that cannot be scored on a lattice."""
    if not transition.first_order:
        raise ValueError(
            f"transition: {transition.name!r} can't be scored on a lattice, because its phi depends on all tokens drafted "
            "before and not on the previous one alone; use sequential drafting, or a first-order transition"
        )


def edge_score(
    transition: Transition,
    params: Params,
    embedding: jax.Array,
    hidden: jax.Array,
    successor: jax.Array,
    unary: jax.Array,
) -> jax.Array:
    """S_t(a, b) = U_t(b) + < phi_t(a), B[b] > of one pair: A[a] [R], h_t [D], B[b] [R], U_t(b) [] -> []."""
    phi, _ = transition.phi(params, embedding, hidden, embedding)
    wide = jnp.promote_types(phi.dtype, jnp.float32)  # as in `bias`: 16-bit tables must not round the scores
    return unary + jnp.dot(phi, successor, preferred_element_type=wide)


def pair_scores(
    transition: Transition,
    params: Params,
    unary: jax.Array,
    candidates: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    draft_to_target: jax.Array | None = None,
    copied: copying.Copied | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`edge_score` from the anchor to each first candidate, and between all neighbouring candidates.

    Args:
      unary: [T, M], base logits of the candidates.
      candidates: int [T, M], draft-vocabulary ids.
      hidden: [T, D].
      anchor: int [], target-vocabulary id.
      draft_to_target: int32 [Vd] or None (the same ids).
      copied: of [T], whose term is added; None: no term.

    Returns: first [M], scores from the anchor; pairs [T-1, M, M], pairs[t-1, i, j] from candidate i at t-1 to j at t.
    Raises ValueError for a transition that is not first order.
    """
    check_first_order(transition)
    edge = functools.partial(edge_score, transition, params)
    from_one = jax.vmap(edge, in_axes=(None, None, 0, 0))  # [M]: over the candidates b
    from_all = jax.vmap(from_one, in_axes=(0, None, None, None))  # [M, M]: over the candidates a before them

    tokens = target_ids(candidates, draft_to_target)
    A, B = embed(params, tokens), successor_rows(params, candidates)
    first = from_one(embed(params, anchor), hidden[0], B[0], unary[0])
    pairs = jax.vmap(from_all)(A[:-1], hidden[1:], B[1:], unary[1:])
    if copied is not None:
        behind_all = jax.vmap(copying.term, in_axes=(None, 0, None))  # [M, M], as `from_all`
        begin, rest = jax.tree.map(lambda x: x[0], copied), jax.tree.map(lambda x: x[1:], copied)
        first += copying.term(begin, anchor, candidates[0])
        pairs += jax.vmap(behind_all)(rest, tokens[:-1], candidates[1:])
    return first, pairs


def walk(
    first: jax.Array, pairs: jax.Array, key: jax.Array, temperature: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Goes through the lattice from the anchor: slot_t ~ q_t = softmax(S_t(slot_{t-1}, .) / temperature).

    The temperature divides the whole score. At 0 the best slot is taken (the first of equal ones).
    Where a step leads does not depend on how it was reached, so the draws behind all M slots are made at once; what is left
    for the scan is to follow them.

    Args: first [M], pairs [T-1, M, M] from `pair_scores`; key; temperature scalar, may be traced.
    Returns: slots int32 [T], indices into the candidates; q float32 [T, M], the very numbers drawn from.
    """

    M = first.shape[0]
    scores = jnp.concatenate([jnp.broadcast_to(first, (1, M, M)), pairs])  # before the first step any slot is the anchor
    q = probabilities(scores, temperature)
    keys = jax.random.split(key, scores.shape[0])
    following = jax.vmap(jax.vmap(draw, in_axes=(None, 0)))(keys, q)

    def step(slot, inputs):
        following, q = inputs
        return following[slot], (following[slot], q[slot])

    return jax.lax.scan(step, jnp.int32(0), (following, q))[1]


def draft_among(
    transition: Transition,
    params: Params,
    candidates: jax.Array,
    unary: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float,
    draft_to_target: jax.Array | None = None,
    copied: copying.Copied | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`lattice_draft` from candidates that are chosen already: int [T, M], draft-vocabulary ids, base logits [T, M]."""
    first, pairs = pair_scores(transition, params, unary, candidates, hidden, anchor, draft_to_target, copied)
    slots, q = walk(first, pairs, key, temperature)
    candidates = target_ids(candidates, draft_to_target)
    return jnp.take_along_axis(candidates, slots[:, None], axis=-1)[:, 0], candidates, q


def lattice_draft(
    transition: Transition,
    params: Params,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float,
    M: int,
    draft_to_target: jax.Array | None = None,
    choose: Choice = top_candidates,
    copied: copying.Copied | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Drafts a block from the M best tokens of the base logits at each position, and those that are ``copied``.

    Arguments as in `sequential_draft`, with M the number of candidates and `choose` what finds them
    (`dspark_jax.candidates`).

    Returns: tokens int32 [T] (target ids), candidates int32 [T, M] (target ids), q float32 [T, M] (over the candidates).
    Raises ValueError for M > Vd, and for a transition that is not first order.
    """
    candidates, unary = copying.admit(*choose(logits, M), logits, copied)
    return draft_among(transition, params, candidates, unary, hidden, anchor, key, temperature, draft_to_target, copied)
