"""The confidence head: how likely draft t survives verification, given that the drafts before it did.

c_t never depends on draft t itself, so any rule "verify t iff f(c_0..c_t)" leaves the output law untouched.

Shape letters: D model width, R transition rank, M the tokens that a draft may be, F statistics of the law; "..." any
leading axes.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dspark_jax.candidates import Choice, top_candidates

LAW_BEST = 4  # of a law's log-probabilities that the head sees
LAW_STATISTICS = LAW_BEST + 2
LAW_UNITS = 32  # of the hidden layer that reads them
LAW_FLOOR = -15.0  # log-probabilities below it are told as it


def confidence_logits(
    kernel: jax.Array, bias: jax.Array, hidden: jax.Array, embedding: jax.Array | None = None
) -> jax.Array:
    """w . [h_t ; A[x_{t-1}]] + b, or w . h_t + b without an embedding; its sigmoid is the probability.

    kernel [D + R] or [D], bias [], hidden [..., D], embedding [..., R] or None -> float32 (or wider) [...].
    Raises ValueError where kernel does not fit the features.
    """
    features = hidden if embedding is None else jnp.concatenate([hidden, embedding], axis=-1)
    if kernel.shape != features.shape[-1:]:
        raise ValueError(
            f"kernel: shape {kernel.shape} does not fit features of width {features.shape[-1]} (hidden {hidden.shape[-1]}, "
            f"embedding {'none' if embedding is None else embedding.shape[-1]}); allowed: [{features.shape[-1]}]"
        )
    wide = jnp.promote_types(features.dtype, jnp.float32)
    return jnp.einsum("...D,D->...", features, kernel, preferred_element_type=wide) + bias


def law_statistics(
    scores: jax.Array, log_normalizer: jax.Array | None = None, choose: Choice = top_candidates
) -> jax.Array:
    """What the law p = softmax(scores) says of its own draft: its `LAW_BEST` best log-probabilities, best first, its entropy, and
    log sum_m exp(scores_m) - log_normalizer, how much the M tokens have of the law over all that the drafter knows, in nats.

    scores [..., M], -inf for a token that cannot be drafted; log_normalizer [...], of that law, None where the M are all;
    choose: what finds the best (`dspark_jax.candidates`) -> [..., LAW_STATISTICS]. None depends on which token is drawn. A
    linear map of h_t, without the product with the vocabulary, could not know them.
    """
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    log_p = scores - log_sum[..., None]
    entropy = -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0), axis=-1)
    share = jnp.zeros_like(log_sum) if log_normalizer is None else log_sum - log_normalizer
    _, best = choose(log_p, min(LAW_BEST, scores.shape[-1]))
    best = jnp.pad(best, [(0, 0)] * (best.ndim - 1) + [(0, LAW_BEST - best.shape[-1])], constant_values=LAW_FLOOR)
    return jnp.concatenate([jnp.maximum(best, LAW_FLOOR), entropy[..., None], share[..., None]], axis=-1)


def law_term(head: Mapping[str, jax.Array], statistics: jax.Array) -> jax.Array:
    """output . silu(statistics kernel + bias), a further term of `confidence_logits`: "kernel" [F, LAW_UNITS], "bias" and "output"
    [LAW_UNITS], statistics [..., F] -> [...].

    What a law promises is not linear in its logarithms: on unseen text a linear term erred by a curve, and told drafts
    apart a little worse.
    """
    wide = lambda name: head[name].astype(statistics.dtype)
    return jax.nn.silu(statistics @ wide("kernel") + wide("bias")) @ wide("output")
