"""What a drafter accepts of a text that the target is known to say.

Greedy speculative decoding says what the target says without it, so the rounds of decoding can be read off a text that was
decoded once: a block is drafted at every anchor of it, all at the same time, and the rounds go from anchor to anchor. No
target runs, and one text serves every drafter, execution and number of candidates.

N anchors, S positions, T draft positions, Vd draft vocabulary, D model width, M candidates, K successors.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import anchors as anchors_lib
from dspark_jax import drafter as drafter_lib
from dspark_jax import copying, transitions
from dspark_jax.candidates import top_candidates
from dspark_jax.lattice import lattice_draft
from dspark_jax.sequential import sequential_draft
from dspark_jax.union import union_among


@dataclasses.dataclass(frozen=True)
class Way:
    """How a block is drafted: with candidates 0 sequentially, otherwise among so many of the base logits and
    ``successors`` of the previous token."""

    candidates: int = 0
    successors: int = 0


@functools.partial(jax.jit, static_argnames="config")
def heads(config, params, embedding, head_rows, features, tokens, anchors):
    """Base logits [N, T, Vd] and hidden states [N, T, D] of blocks at ``anchors`` int [N] of one text: features
    [S, taps * D] (what lies behind the anchors is not seen), tokens int [S]."""
    keep = jnp.ones((1, len(anchors)), bool)
    hidden = drafter_lib.training_hidden(config, params, embedding, features[None].astype(embedding.dtype), tokens[None],
                                         anchors[None], keep)[0]
    return drafter_lib.base_logits(config, head_rows, hidden), hidden


@functools.partial(jax.jit, static_argnames="config")
def copied(config, params, draft_to_target, hidden, tokens, anchors):
    """The copy term [N, T] of blocks at ``anchors``, arguments as in `heads`; None for a drafter without it."""
    if not config.copy_length:
        return None
    to_draft = lambda tokens: copying.draft_ids(tokens, draft_to_target)
    return jax.vmap(lambda last, hidden: copying.behind(params["copying"], tokens, last, hidden, to_draft))(anchors, hidden)


@functools.partial(jax.jit, static_argnames=("config", "way"))
def paths(config, way, params, draft_to_target, base, hidden, first, successors=None, copied=None):
    """The tokens int [N, T] (target ids) that are drafted greedily behind the anchor tokens ``first`` int [N].

    successors int [V, K]: of `union.successor_table`, where ``way`` has some. copied: what the function of that name gives.
    Raises ValueError where that is missing."""
    if config.copy_length and copied is None:
        raise ValueError(f"copied: None; allowed: the term of the blocks, for a drafter of copy_length {config.copy_length}")
    transition, table = transitions.get_transition(config.transition), params.get("transition", {})

    def one(base, hidden, anchor, copied):
        block = base, hidden, anchor, jax.random.key(0), 0.0, draft_to_target
        if not way.candidates:
            return sequential_draft(transition, table, *block, copied)[0]
        if not way.successors:
            return lattice_draft(transition, table, *block[:-1], way.candidates, draft_to_target, copied=copied)[0]
        ids, unary = copying.admit(*top_candidates(base, way.candidates), base, copied)
        return union_among(transition, table, ids, unary, hidden, anchor, jax.random.key(0), 0.0, base, successors,
                           draft_to_target, copied)[0]

    return jax.vmap(one)(base, hidden, first, copied)


@jax.jit
def ranks(base, labels):
    """How many tokens have a larger base logit than the label, int [N, T]; labels int [N, T] (draft ids, -1: cannot be
    drafted, whose rank is Vd)."""
    score = jnp.take_along_axis(base, jnp.maximum(labels, 0)[..., None], axis=-1)
    return jnp.where(labels < 0, base.shape[-1], jnp.sum(base > score, axis=-1))


def rounds(right, length):
    """The rounds of decoding along a text: right bool [N, T], whether each draft behind anchor i is the text's token;
    ``length``: N + 1 tokens of answer, of which the first comes from the prompt's own pass.

    -> accepted, proposed: lists of int. A round ends where the text does, and what lies behind was never proposed.
    """
    matches = np.cumprod(right, axis=1).sum(axis=1)
    accepted, proposed, at = [], [], 0
    while at < length - 1:
        left = length - 1 - at
        m = int(min(matches[at], left))
        accepted.append(m)
        proposed.append(min(right.shape[1], left) if m == left else right.shape[1])
        at += m + 1
    return accepted, proposed


def labels_of(answer, anchors, T):
    """The tokens behind each anchor, int [N, T], -1 behind the end. answer: int [length]."""
    at = np.asarray(anchors)[:, None] + 1 + np.arange(T)
    return np.where(at < len(answer), np.asarray(answer)[np.minimum(at, len(answer) - 1)], -1)
