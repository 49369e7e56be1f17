"""The confidence head: how likely draft t survives verification, given that the drafts before it did.

c_t never depends on draft t itself, so any rule "verify t iff f(c_0..c_t)" leaves the output law untouched.

Shape letters: D model width, R transition rank, M the tokens that a draft may be; "..." any leading axes.
"""

import jax
import jax.numpy as jnp


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


def law_statistics(scores: jax.Array, log_normalizer: jax.Array | None = None) -> jax.Array:
    """What the law p = softmax(scores) says of its own draft: the best log-probability, the entropy, and log sum_m exp(scores_m)
    - log_normalizer, how much the M tokens have of the law over all that the drafter knows, in nats.

    scores [..., M], -inf for a token that cannot be drafted; log_normalizer [...], of that law, None where the M are all ->
    [..., 3]. None depends on which token is drawn. A linear map of h_t, without the product with the vocabulary, could not
    know them.
    """
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    log_p = scores - log_sum[..., None]
    entropy = -jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0), axis=-1)
    share = jnp.zeros_like(log_sum) if log_normalizer is None else log_sum - log_normalizer
    return jnp.stack([jnp.max(log_p, axis=-1), entropy, share], axis=-1)


def law_term(weights: jax.Array, scores: jax.Array, log_normalizer: jax.Array | None = None) -> jax.Array:
    """weights . `law_statistics`, a further term of `confidence_logits`: [3], [..., M] and [...] -> [...]. The law itself learns
    nothing from it."""
    statistics = law_statistics(*jax.lax.stop_gradient((scores, log_normalizer)))
    return statistics @ weights.astype(statistics.dtype)
