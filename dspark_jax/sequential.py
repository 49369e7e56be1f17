"""Drafting one token after the other over the whole vocabulary: the exact form of every transition.

Shape letters: T draft positions, V target vocabulary, Vd draft vocabulary, D model width, R rank. One block; batch with
jax.vmap.
"""

import jax
import jax.numpy as jnp

from dspark_jax import copying
from dspark_jax.sampling import draw, probabilities
from dspark_jax.transitions import Params, Transition, bias, embed, initial_state, target_ids


def sequential_draft(
    transition: Transition,
    params: Params,
    logits: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float,
    draft_to_target: jax.Array | None = None,
    copied: copying.Copied | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x_t ~ q_t = softmax((U_t + phi_t(x_{t-1}) B^T) / temperature) for t = 0..T-1, with x_{-1} the anchor.

    Args:
      transition, params: from `dspark_jax.transitions`; predecessors index the target vocabulary, successors the draft's.
      logits: [T, Vd], base logits U.
      hidden: [T, D], drafter states after the final norm.
      anchor: int [], target-vocabulary id of the token before the first draft.
      key: a PRNG key, unused in effect at temperature 0.
      temperature: scalar, may be traced; 0 takes the best token.
      draft_to_target: int32 [Vd], target id of each draft id; None: the same ids.
      copied: of [T], whose term is added; None: no term.

    Returns: tokens int32 [T] (target ids), q float32 [T, Vd] (what each token was drawn from), corrected logits [T, Vd].
    """

    def step(carry, inputs):
        previous, state = carry
        unary, h, key, copy = inputs
        phi, state = transition.phi(params, embed(params, previous), h, state)
        corrected = unary + bias(params, phi)
        if copy is not None:
            corrected += copying.term(copy, previous, jnp.arange(corrected.shape[-1]))
        q = probabilities(corrected, temperature)
        token = target_ids(draw(key, q), draft_to_target)
        return (token, state), (token, q, corrected)

    anchor = jnp.asarray(anchor, jnp.int32)
    state = initial_state(embed(params, anchor), hidden)
    keys = jax.random.split(key, logits.shape[0])
    return jax.lax.scan(step, (anchor, state), (logits, hidden, keys, copied))[1]
