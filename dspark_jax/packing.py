"""Several documents in one row of a batch.

``documents`` int [..., S] says which document each token of a row belongs to: the tokens of one lie side by side and
have the same number, different documents have different numbers. Padding behind the last one counts as one more
document. Nothing may cross from one into another: `positions` restart in each, attention compares the numbers, and
`supervised` keeps blocks inside.
"""

import jax
import jax.numpy as jnp


def first_tokens(documents: jax.Array) -> jax.Array:
    """Where documents begin: int [..., S] -> bool [..., S]."""
    begin = documents[..., 1:] != documents[..., :-1]
    return jnp.concatenate([jnp.ones((*documents.shape[:-1], 1), bool), begin], axis=-1)


def positions(documents: jax.Array) -> jax.Array:
    """Position of each token in its document, from 0: int [..., S] -> int32 [..., S]."""
    index = jnp.broadcast_to(jnp.arange(documents.shape[-1], dtype=jnp.int32), documents.shape)
    begin = jnp.where(first_tokens(documents), index, 0)
    return index - jax.lax.cummax(begin, axis=documents.ndim - 1)


def supervised(loss_mask: jax.Array, documents: jax.Array) -> jax.Array:
    """The mask with the first token of each document taken out: [..., S] -> [..., S].

    An anchor needs a supervised token behind it and a block ends before the first one that is not, so with this mask
    neither reaches into the next document.
    """
    return jnp.where(first_tokens(documents), jnp.zeros((), loss_mask.dtype), loss_mask)
