"""The token-transition term: one low-rank score shared by every drafter of this library.

At draft position t, with base logits U_t, drafter state h_t, previous token a and candidate b,

    score_t(a -> b) = U_t(b) + < phi_t(a), B[b] >

A transition is a rule for phi. `TRANSITIONS` is the whole list; a new one is one function and one entry.

    none        no term: the rank-zero transition          (DFlash)
    vanilla     phi = A[a]                                 (DSpark, default head)
    context     phi = (P h_t) * A[a]                       (DFlash-2, Selector)
    joint       phi = sigmoid(W [h_t ; A[a]] + c) * A[a]   (DSpark, gated head)
    recurrent   phi = tanh(u_o), read from a gated state   (DSpark, rnn head)

Parameters are a plain dict of arrays whose names and shapes are `Transition.parameter_shapes`.

Shape letters: T draft positions, V target vocabulary, Vd draft vocabulary (the ids a drafter can propose, Vd <= V),
D model width, R transition rank; "..." any leading axes.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Params = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transition:
    """A rule for phi.

    Attributes:
      name: its key in `TRANSITIONS`.
      first_order: whether phi depends on the past through the previous token alone. Only then can all pairs of
        candidates be scored before any token is chosen (`dspark_jax.lattice`).
      parameter_shapes: (V, Vd, D, R) -> dict of parameter name -> shape.
      phi: (params, embedding [..., R], hidden [..., D], state [..., R]) -> (phi [..., R], next state [..., R]), where
        embedding is A[a]. A first-order rule hands the state back untouched.
    """

    name: str
    first_order: bool
    parameter_shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]]
    phi: Callable[[Params, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _none(params, embedding, hidden, state):
    del params, hidden
    return embedding, state  # [..., 0]: see `embed`


def _vanilla(params, embedding, hidden, state):
    del params, hidden
    return embedding, state


def _context(params, embedding, hidden, state):
    gate = hidden @ params["hidden_projection"]  # linear: signed and unbounded, no bias
    return gate * embedding, state


def _joint(params, embedding, hidden, state):
    z = jnp.concatenate([hidden, embedding], axis=-1)
    gate = jax.nn.sigmoid(z @ params["gate_kernel"] + params["gate_bias"])
    return gate * embedding, state


def _recurrent(params, embedding, hidden, state):
    z = jnp.concatenate([state, embedding, hidden], axis=-1)
    keep, new, out = jnp.split(z @ params["joint_kernel"] + params["joint_bias"], 3, axis=-1)
    keep = jax.nn.sigmoid(keep)
    # The output is read from z, that is from the state before this update.
    return jnp.tanh(out), keep * state + (1 - keep) * jnp.tanh(new)


def _tables(V, Vd, D, R):
    del D
    return {"predecessor": (V, R), "successor": (Vd, R)}


TRANSITIONS: dict[str, Transition] = {
    t.name: t
    for t in (
        Transition(name="none", first_order=True, phi=_none, parameter_shapes=lambda V, Vd, D, R: {}),
        Transition(name="vanilla", first_order=True, phi=_vanilla, parameter_shapes=_tables),
        Transition(
            name="context",
            first_order=True,
            phi=_context,
            parameter_shapes=lambda V, Vd, D, R: _tables(V, Vd, D, R) | {"hidden_projection": (D, R)},
        ),
        Transition(
            name="joint",
            first_order=True,
            phi=_joint,
            parameter_shapes=lambda V, Vd, D, R: _tables(V, Vd, D, R) | {"gate_kernel": (D + R, R), "gate_bias": (R,)},
        ),
        Transition(
            name="recurrent",
            first_order=False,
            phi=_recurrent,
            parameter_shapes=lambda V, Vd, D, R: (
                _tables(V, Vd, D, R) | {"joint_kernel": (2 * R + D, 3 * R), "joint_bias": (3 * R,)}
            ),
        ),
    )
}


def get_transition(name: str) -> Transition:
    """`TRANSITIONS[name]`; raises ValueError that lists the known names."""
    if name not in TRANSITIONS:
        raise ValueError(f"transition: unknown name {name!r}; allowed: {', '.join(TRANSITIONS)}")
    return TRANSITIONS[name]


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """A[a] for token ids int [...] of the target vocabulary: [..., R]. Without a table A the rank is 0: [..., 0]."""
    if "predecessor" not in params:
        return jnp.zeros((*jnp.shape(tokens), 0), jnp.float32)
    return jnp.asarray(params["predecessor"])[tokens]


def target_ids(ids: jax.Array, draft_to_target: jax.Array | None) -> jax.Array:
    """Draft-vocabulary ids as target ids, int [...]: draft_to_target int [Vd], or None where both are the same."""
    return ids if draft_to_target is None else jnp.asarray(draft_to_target, jnp.int32)[ids]


def successor_rows(params: Params, tokens: jax.Array) -> jax.Array:
    """B[b] for token ids int [...] of the draft vocabulary: [..., R]. Without a table B: [..., 0]."""
    if "successor" not in params:
        return jnp.zeros((*jnp.shape(tokens), 0), jnp.float32)
    return jnp.asarray(params["successor"])[tokens]


def initial_state(embedding: jax.Array, hidden: jax.Array) -> jax.Array:
    """The state before the first draft of a block: zeros [..., R] like `embedding`, in the dtype phi returns it in."""
    return jnp.zeros(embedding.shape, jnp.result_type(embedding, hidden))


def bias(params: Params, phi: jax.Array) -> jax.Array:
    """< phi, B[b] > for every draft token b: phi [..., R] -> [..., Vd], summed in float32 or wider. No table B: 0."""
    if "successor" not in params:
        return jnp.zeros((), jnp.float32)
    wide = jnp.promote_types(phi.dtype, jnp.float32)
    return jnp.einsum("...R,VR->...V", phi, params["successor"], preferred_element_type=wide)


def bias_at(params: Params, phi: jax.Array, tokens: jax.Array) -> jax.Array:
    """`bias` at some draft tokens only: phi [..., R], tokens int [..., M] -> [..., M]."""
    wide = jnp.promote_types(phi.dtype, jnp.float32)
    return jnp.einsum("...R,...MR->...M", phi, successor_rows(params, tokens), preferred_element_type=wide)


def teacher_forced_phi(
    transition: Transition, params: Params, predecessors: jax.Array, hidden: jax.Array
) -> jax.Array:
    """phi_t at every position of a block whose tokens are known.

    Args:
      predecessors: int [..., T], the token before each draft: the anchor, then the labels but the last.
      hidden: [..., T, D], drafter states after the final norm.

    Returns: [..., T, R]. All positions at once for a first-order transition; otherwise a scan over T from a zero state.
    """
    embedding = embed(params, predecessors)
    if transition.first_order:
        return transition.phi(params, embedding, hidden, embedding)[0]

    def step(state, inputs):
        phi, state = transition.phi(params, *inputs, state)
        return state, phi

    steps = jnp.moveaxis(embedding, -2, 0), jnp.moveaxis(hidden, -2, 0)
    _, phi = jax.lax.scan(step, initial_state(steps[0][0], steps[1][0]), steps)
    return jnp.moveaxis(phi, 0, -2)


def teacher_forced_logits(
    transition: Transition, params: Params, logits: jax.Array, predecessors: jax.Array, hidden: jax.Array
) -> jax.Array:
    """U_t(b) + < phi_t(a_t), B[b] > with known predecessors a_t.

    logits [..., T, Vd], predecessors int [..., T], hidden [..., T, D] -> [..., T, Vd].
    """
    return logits + bias(params, teacher_forced_phi(transition, params, predecessors, hidden))
