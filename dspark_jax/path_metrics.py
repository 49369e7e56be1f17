"""How good drafted paths and the candidates they were chosen from are, against the tokens that came.

Shape letters: T draft positions; "..." leading axes (batch, anchors).
"""

import jax
import jax.numpy as jnp

from dspark_jax.losses import Ratio, expected_accepted_length, supervised_blocks, weighted


def path_terms(
    found: jax.Array, mass: jax.Array, forced: jax.Array, walked: jax.Array, mask: jax.Array
) -> dict[str, Ratio]:
    """Metrics as undivided sums.

    Args:
      found: bool [..., T], the label is a candidate.
      mass: [..., T], the probability that the target's law gives the candidates.
      forced: bool [..., T], the drafter's choice behind the true tokens is the label.
      walked: bool [..., T], its choice behind its own choices is the label.
      mask: bool [..., T], supervised drafts.

    Returns: dict of `Ratio`, the first four [T], per position:
      "candidate_recall", "candidate_mass", "forced_accuracy": means over supervised drafts;
      "path_accuracy": mean of `walked` over those behind a path that is right so far;
      "path_accepted_length", "oracle_accepted_length": 1 + the length of the right prefix, of the drafter's own path
      and of the best path through the candidates; means over blocks.
    """
    leading = tuple(range(mask.ndim - 1))
    drafts, blocks = mask.astype(jnp.float32), supervised_blocks(mask)
    right = jnp.cumprod(walked & mask, axis=-1)
    alive = jnp.concatenate([jnp.ones_like(right[..., :1]), right[..., :-1]], axis=-1)
    return {
        "candidate_recall": weighted(drafts, found, leading),
        "candidate_mass": weighted(drafts, mass, leading),
        "forced_accuracy": weighted(drafts, forced, leading),
        "path_accuracy": weighted(drafts * alive, walked, leading),
        "path_accepted_length": weighted(blocks, expected_accepted_length(walked, mask)),
        "oracle_accepted_length": weighted(blocks, expected_accepted_length(found, mask)),
    }
