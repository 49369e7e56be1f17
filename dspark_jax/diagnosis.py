"""Where numbers stopped being finite: said in words, once decoding has found that some did."""

import jax
import numpy as np

from dspark_jax import target as target_lib


def not_finite(target, drafter, tokens) -> str:
    """The first thing that holds NaN or infinity: a weight of target or drafter, a layer of the target run on ``tokens``
    (list of ids), its logits; or, by exclusion, the drafter's scores."""
    for owner, params in (("target", target.params), ("drafter", drafter.params if drafter else {})):
        for path, array in jax.tree_util.tree_leaves_with_path(params):
            if not _finite(array):
                return f"the {owner}'s weight {'.'.join(str(key.key) for key in path)} is not finite"
    ids = np.array([tokens])
    for layer, hidden in zip(range(target_lib.EMBEDDING, target.config.num_hidden_layers), target.hidden_states(ids)):
        if not _finite(hidden):
            what = "embedding output" if layer == target_lib.EMBEDDING else f"layer {layer}"
            return f"the output of the target's {what} is not finite, though all its weights are"
    if not _finite(target.logits(ids)):
        return "the target's logits are not finite, though all its layers are"
    return "the drafter's scores are not finite, though its weights and the target's logits are"


def _finite(array):
    return bool(jax.numpy.all(jax.numpy.isfinite(array)))
