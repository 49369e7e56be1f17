"""Blocks: where they start, what their slots hold, what they predict and what they may see.

A block hangs on an anchor: a token at position a that is known and not yet processed by the target. Draft t of the
block (t = 0..T-1) is the token at position a+1+t. Two layouts of the same block exist, and a drafter is trained for one:

    "anchor_first"   T slots;   slot j sits at position a+j and predicts token a+j+1      (DSpark)
    "fill_in"        T+1 slots; slot j sits at position a+j and predicts that same token  (DFlash, DFlash-2)

In "fill_in" slot 0, the anchor, predicts nothing. In both layouts draft t is read from the last T slots of the block.

Sequences hold N anchors each. An unused place has keep = False and anchor 0: it predicts nothing and sees nothing.
Masks over tokens (`loss_mask`) may be of any dtype and count as true above 0.5.

Shape letters: B batch, S context length, N anchors per sequence, T draft positions, J slots of a block.
"""

import jax
import jax.numpy as jnp

from dspark_jax import packing

LAYOUTS = ("anchor_first", "fill_in")


def slots(layout: str, T: int) -> int:
    """Number J of slots that give T drafts. Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: unknown name {layout!r}; allowed: {', '.join(LAYOUTS)}")
    return T if layout == "anchor_first" else T + 1


def candidate_mask(loss_mask: jax.Array) -> jax.Array:
    """Positions that can be anchors: token a and token a+1 are both supervised. [..., S] -> bool [..., max(S-1, 0)].

    So the last prompt token is never an anchor; neither is it in decoding, where the first anchor is a generated token.
    """
    supervised = loss_mask > 0.5
    return supervised[..., :-1] & supervised[..., 1:]


def sample_anchors(
    key: jax.Array, loss_mask: jax.Array, count: int, documents: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws up to `count` distinct anchors per sequence, uniformly among its candidates.

    Where a sequence is packed with `documents`, each of them gets the same number of anchors, uniformly among its own
    candidates, as far as it has so many; what it leaves goes to the others. (Drawn from the row as a whole, a short
    document beside a long one would get next to none.)

    Args:
      key: a PRNG key.
      loss_mask: [B, S]; of packed documents, `packing.supervised`.
      count: N.
      documents: int [B, S] (see `dspark_jax.packing`), or None where a sequence is one document.

    Returns: anchors int32 [B, N], ascending, unused places last and 0; keep bool [B, N].
    """
    candidates = candidate_mask(loss_mask)
    priority = jnp.where(candidates, jax.random.uniform(key, candidates.shape), -jnp.inf)
    if documents is not None:
        priority -= _rank(priority, documents[..., :-1])  # first the best of each document, then the second of each
    priority = jnp.pad(
        priority, ((0, 0), (0, max(0, count - candidates.shape[-1]))), constant_values=-jnp.inf)
    best, position = jax.lax.top_k(priority, count)  # the N largest of iid numbers: a uniform draw without replacement
    unused = priority.shape[-1]
    anchors = jnp.sort(jnp.where(best > -jnp.inf, position, unused), axis=-1)
    keep = anchors < unused
    return jnp.where(keep, anchors, 0).astype(jnp.int32), keep


def _rank(priority, documents):
    """How many places of the same document have a higher priority: [B, S], int [B, S] -> int32 [B, S]."""
    order = jnp.lexsort((-priority, documents), axis=-1)
    rank = packing.positions(jnp.take_along_axis(documents, order, axis=-1))
    return jnp.take_along_axis(rank, jnp.argsort(order, axis=-1), axis=-1)


def label_indices(anchors: jax.Array, T: int) -> jax.Array:
    """Positions of the drafted tokens, a+1+t, past the end of the sequence included. int [B, N] -> int [B, N, T]."""
    return anchors[..., None] + 1 + jnp.arange(T, dtype=anchors.dtype)


def safe_label_indices(anchors: jax.Array, keep: jax.Array, T: int, S: int) -> jax.Array:
    """`label_indices` moved to where a gather is allowed: at most S-1, and 0 in unused blocks. int [B, N, T]."""
    return jnp.where(keep[..., None], jnp.minimum(label_indices(anchors, T), S - 1), 0)


def target_indices(anchors: jax.Array, keep: jax.Array, T: int, S: int) -> jax.Array:
    """Positions at which the target predicts the labels: the token before each (safe) label. int [B, N, T]."""
    return jnp.maximum(safe_label_indices(anchors, keep, T, S) - 1, 0)


def gather(rows: jax.Array, indices: jax.Array) -> jax.Array:
    """rows[b, indices[b, ...]]: [B, S, ...], int [B, N, T] -> [B, N, T, ...]."""
    return jax.vmap(lambda row, index: row[index])(rows, indices)


def labels(tokens: jax.Array, anchors: jax.Array, keep: jax.Array, T: int) -> jax.Array:
    """The tokens to predict: int [B, S] -> int [B, N, T]. Meaningful where `evaluation_mask` is true."""
    return gather(tokens, safe_label_indices(anchors, keep, T, tokens.shape[-1]))


def predecessors(tokens: jax.Array, anchors: jax.Array, keep: jax.Array, T: int) -> jax.Array:
    """The token before each label, for teacher forcing: the anchor, then the labels but the last. int [B, N, T]."""
    known = labels(tokens, anchors, keep, T)
    return jnp.concatenate([gather(tokens, anchors)[..., None], known[..., :-1]], axis=-1)


def evaluation_mask(loss_mask: jax.Array, anchors: jax.Array, keep: jax.Array, T: int) -> jax.Array:
    """Which drafts are supervised: kept block, label inside the sequence, label supervised, and all earlier drafts too.

    A draft behind an unsupervised one can't be reached by verification, hence the running AND. [B, S] -> bool [B, N, T].
    """
    S = loss_mask.shape[-1]
    supervised = gather(loss_mask > 0.5, safe_label_indices(anchors, keep, T, S))
    valid = keep[..., None] & (label_indices(anchors, T) < S) & supervised
    return jnp.cumprod(valid.astype(jnp.int32), axis=-1).astype(bool)


def block_tokens(tokens: jax.Array, anchors: jax.Array, keep: jax.Array, slots: int, mask_token_id: int) -> jax.Array:
    """What the drafter reads: the anchor token, then mask tokens; only mask tokens in unused blocks. int [B, N, J]."""
    first = jnp.where(keep, gather(tokens, anchors), mask_token_id)
    rest = jnp.full((*anchors.shape, slots - 1), mask_token_id, first.dtype)
    return jnp.concatenate([first[..., None], rest], axis=-1)


def block_positions(anchors: jax.Array, slots: int) -> jax.Array:
    """Positions a+j of the slots for rotary embedding, not clamped to the sequence. int [B, N] -> int [B, N, J].

    Of packed documents, `anchors` are positions in the document.
    """
    return anchors[..., None] + jnp.arange(slots, dtype=anchors.dtype)


def block_visibility(anchors: jax.Array, keep: jax.Array, S: int, slots: int) -> jax.Array:
    """Who sees what in training: all blocks of a sequence side by side, behind one copy of its context.

    Context position i is visible iff i < a: strictly, for the target has not processed the anchor yet when it drafts.
    Slots see their own block in both directions and never another block. Unused blocks see nothing at all, so a
    softmax over such a row must be guarded.

    Args: anchors int [B, N], keep bool [B, N]. Returns: bool [B, N*J, S + N*J]; keys are the context, then the blocks.
    """
    B, N = anchors.shape
    context = jnp.arange(S) < anchors[..., None]  # [B, N, S]
    own = jnp.repeat(jnp.eye(N, dtype=bool), slots, axis=-1)  # [N, N*J]
    visible = jnp.concatenate([context, jnp.broadcast_to(own, (B, N, N * slots))], axis=-1)
    return jnp.repeat(visible & keep[..., None], slots, axis=1)
