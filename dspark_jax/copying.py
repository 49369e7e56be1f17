"""The copy term: what followed the same words earlier in the text.

Text repeats itself, and a drafter of few layers does not see where. Take the last n tokens up to the anchor, n as large as
possible and at most N, that stand earlier in the text too, the latest such place, and let c_0, c_1, ... be what followed
there. With c_{-1} the anchor, the score of a pair has one more term of rank one:

    S_t(a, b) = U_t(b) + < phi_t(a), B[b] > + beta_t [a = c_{t-1}] [b = c_t]
    beta_t    = w[min(n + t, N)] + < v, h_t >

Behind a = c_{t-1} the last n + t tokens are those of the earlier place, so one weight per length of agreement serves all
positions. The term knows the past by the previous token alone: a lattice scores it with all other pairs. Drafting by such
agreement, without a drafter, is known as prompt lookup; here it competes with what the drafter says.

Shape letters: S tokens of a text, N longest agreement, T draft positions, Vd draft vocabulary, D model width, M candidates;
"..." any leading axes.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Copied(NamedTuple):
    """The term of a block: ``before`` int [..., T], c_{t-1} as target ids; ``ids`` int [..., T], c_t as draft ids, -1 where
    there is none or it cannot be drafted; ``bonus`` float [..., T], beta_t; ``agreement`` float [..., T], min(n + t, N) / N, 0
    where nothing agrees."""

    before: jax.Array
    ids: jax.Array
    bonus: jax.Array
    agreement: jax.Array


def find(text: jax.Array, last: jax.Array, N: int, T: int, begin: jax.Array | int = 0) -> tuple[jax.Array, jax.Array]:
    """What followed the longest earlier agreement with text[..last]: int [S], int [] -> tokens int32 [T], n int32 [].

    Agreements of up to N tokens are told apart; of equal ones the latest counts. Where what followed reaches ``last`` it goes on
    from its own beginning, as a text that repeats itself does. Tokens before ``begin`` are not seen, nor are those behind
    ``last``. n is 0, and the tokens -1, where the token at ``last`` is new.
    """
    place = jnp.arange(text.shape[0])
    agrees, n = (begin <= place) & (place < last), jnp.zeros(text.shape, jnp.int32)
    for back in range(N):  # does text[place - back] equal text[last - back]?
        agrees &= (jnp.roll(text, back) == text[last - back]) & (place - back >= begin)
        n += agrees
    best = jnp.argmax(n * text.shape[0] + place)  # the longest, then the latest
    n = n[best]
    tokens = text[best + 1 + jnp.arange(T) % jnp.maximum(last - best, 1)]
    return jnp.where(n > 0, tokens, -1).astype(jnp.int32), n


def draft_ids(tokens: jax.Array, draft_to_target: jax.Array | None) -> jax.Array:
    """Target ids (or -1) as draft ids, -1 where a token cannot be drafted: int [...], int [Vd] or None -> int32 [...]."""
    if draft_to_target is None:
        return tokens
    same = tokens[..., None] == draft_to_target
    return jnp.where(jnp.any(same, axis=-1), jnp.argmax(same, axis=-1), -1).astype(jnp.int32)


def copied(
    params: Mapping[str, jax.Array],
    hidden: jax.Array,
    anchor: jax.Array,
    tokens: jax.Array,
    ids: jax.Array,
    n: jax.Array,
) -> Copied:
    """The term of blocks behind what `find` found.

    params: "weight" [N] and "kernel" [D], w and v; hidden [..., T, D]; anchor int [...]; tokens int [..., T] and
    the same as draft ids; n int [...].
    """
    weight, wide = params["weight"], jnp.promote_types(hidden.dtype, jnp.float32)
    N = weight.shape[0]
    agreement = jnp.where(n[..., None] > 0, jnp.minimum(n[..., None] + jnp.arange(tokens.shape[-1]), N), 0)
    bonus = jnp.einsum("...D,D->...", hidden, params["kernel"], preferred_element_type=wide)
    bonus += weight.astype(wide)[jnp.maximum(agreement - 1, 0)]
    before = jnp.concatenate([anchor[..., None], tokens[..., :-1]], axis=-1)
    return Copied(before, ids, bonus, agreement.astype(wide) / N)


def behind(
    params: Mapping[str, jax.Array],
    text: jax.Array,
    last: jax.Array,
    hidden: jax.Array,
    to_draft: Callable[[jax.Array], jax.Array],
    begin: jax.Array | int = 0,
) -> Copied:
    """`copied` of what `find` finds: the term of the block behind text[last]. Batch with jax.vmap.

    text int [S]; last, begin int []; hidden [T, D]; to_draft: target ids (or -1) int [T] -> draft ids, -1 for none.
    """
    tokens, n = find(text, last, params["weight"].shape[0], hidden.shape[0], begin)
    return copied(params, hidden, text[last], tokens, to_draft(tokens), n)


def term(copy: Copied, previous: jax.Array, ids: jax.Array) -> jax.Array:
    """beta_t [previous = c_{t-1}] [id = c_t]: previous int [...] (target ids), ids int [..., M] (draft ids), for a ``copy`` of
    [...] -> [..., M]."""
    bonus = jnp.where(previous == copy.before, copy.bonus, 0)
    return jnp.where((ids == copy.ids[..., None]) & (copy.ids[..., None] >= 0), bonus[..., None], 0)


def statistics(copy: Copied, previous: jax.Array, ids: jax.Array, scores: jax.Array) -> jax.Array:
    """What the copy says of the draft behind ``previous`` before it is drawn: the agreement, and the chance of the copied token
    in the law softmax(scores); both 0 where ``previous`` is not what was copied.

    previous int [...] (target ids), ids int [..., M] (draft ids) and scores [..., M], -inf for one that cannot be drafted, for a
    ``copy`` of [...] -> [..., 2].
    """
    follows = previous == copy.before
    same = (ids == copy.ids[..., None]) & (follows & (copy.ids >= 0))[..., None]
    chance = jnp.sum(jnp.where(same, jax.nn.softmax(scores, axis=-1), 0), axis=-1)
    return jnp.stack([jnp.where(follows, copy.agreement, 0).astype(chance.dtype), chance], axis=-1)


def admit(
    ids: jax.Array, scores: jax.Array, logits: jax.Array, copy: Copied | None
) -> tuple[jax.Array, jax.Array]:
    """Candidates among which the copied token is: where it is missing it takes the last one's place, with its base logit.

    ids int [..., M] and scores [..., M], best first, of logits [..., Vd], for a ``copy`` of [...] -> the same two, unchanged
    where ``copy`` is None.
    """
    if copy is None:
        return ids, scores
    missing = (copy.ids >= 0) & ~jnp.any(ids == copy.ids[..., None], axis=-1)
    place = missing[..., None] & (jnp.arange(ids.shape[-1]) == ids.shape[-1] - 1)
    score = jnp.take_along_axis(logits, jnp.maximum(copy.ids, 0)[..., None], axis=-1)
    return jnp.where(place, copy.ids[..., None], ids), jnp.where(place, score, scores)
