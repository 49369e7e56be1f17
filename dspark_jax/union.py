"""Drafting among the best tokens of the base logits and the likeliest successors of the previous token.

The base logits of a position know nothing of the token before it, so what follows an unusual token may be missing from
their M best. The transition knows it: the K tokens b with the largest < A[a], B[b] > are read from a table over all a,
computed once per checkpoint. As the candidates then depend on the path, they are scored step by step, M + K at a time.

Shape letters: T draft positions, M candidates of the base logits, K successors of a token, V target vocabulary, Vd
draft vocabulary, D model width, R rank. One block; batch with jax.vmap.
"""

import functools

import jax
import jax.numpy as jnp

from dspark_jax import copying
from dspark_jax.candidates import top_candidates
from dspark_jax.lattice import check_first_order, edge_score
from dspark_jax.sampling import draw, probabilities
from dspark_jax.transitions import Params, Transition, bias, embed, successor_rows, target_ids

ROWS = 64  # of the table are computed at a time: [ROWS, Vd] scores


@functools.partial(jax.jit, static_argnames=("K",))
def successor_table(params: Params, K: int) -> jax.Array:
    """The K tokens b with the largest < A[a], B[b] > for every token a, best first: int32 [V, K], draft-vocabulary ids.

    The term without its gate, which depends on the tokens alone. Raises ValueError where K is not in 1..Vd.
    """
    tokens = jnp.arange(params["predecessor"].shape[0])
    best = lambda a: top_candidates(bias(params, embed(params, a)), K)[0]
    return jax.lax.map(best, tokens, batch_size=ROWS)


def union_among(
    transition: Transition,
    params: Params,
    candidates: jax.Array,
    unary: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float,
    logits: jax.Array,
    successors: jax.Array,
    draft_to_target: jax.Array | None = None,
    copied: copying.Copied | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x_t ~ q_t = softmax(S_t(x_{t-1}, .) / temperature) over the M best of U_t and the K successors of x_{t-1}.

    Arguments as in `lattice.draft_among`, and logits [T, Vd], the U_t that the candidates are the best of; successors:
    int32 [V, K] from `successor_table`. With K = 0 it is that draft.

    Returns: tokens int32 [T] (target ids), candidates int32 [T, M + K] (target ids), q float32 [T, M + K]. A successor
    that is among the M best already is repeated in the candidates, with probability 0.
    Raises ValueError for a transition that is not first order.
    """
    check_first_order(transition)

    def step(previous, inputs):
        t, h, base, unary, key, copy = inputs
        extra = successors[previous]
        repeated = jnp.any(extra[:, None] == base, axis=-1)
        either = jnp.concatenate([base, extra])
        unary = jnp.concatenate([unary, jnp.where(repeated, -jnp.inf, logits[t, extra])])
        edges = jax.vmap(functools.partial(edge_score, transition, params), in_axes=(None, None, 0, 0))
        scores = edges(embed(params, previous), h, successor_rows(params, either), unary)
        if copy is not None:
            scores += copying.term(copy, previous, either)
        q = probabilities(scores, temperature)
        either = target_ids(either, draft_to_target)
        token = either[draw(key, q)]
        return token, (token, either, q)

    T = logits.shape[0]
    steps = jnp.arange(T), hidden, candidates, unary, jax.random.split(key, T), copied
    return jax.lax.scan(step, jnp.asarray(anchor, jnp.int32), steps)[1]
