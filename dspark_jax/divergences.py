"""How far a draft law p = softmax(z) is from a label, and from the target's law q = softmax(y).

    cross entropy   -log p(label)
    KL              sum_v q_v log(q_v / p_v)
    L1              sum_v |p_v - q_v|, twice the total variation: weigh a total-variation loss as half an L1
    accept rate     alpha = 1 - L1 / 2 = sum_v min(p_v, q_v), the chance that a draw from p survives verification by q

Everything is computed in float32 or wider. Shape letters: V vocabulary of the logits; "..." any leading axes.

A drafter with a vocabulary of its own gives the target's other tokens no probability. `l1_distance` takes the target's
logits on the draft vocabulary and the log-normaliser log sum_v exp(y_v) of its law over all tokens, and is then the
distance over all tokens, so that the accept rate is what verification will see. KL would be infinite there: it is taken
between the laws given that the token can be drafted.
"""

import jax
import jax.numpy as jnp


def wide(x: jax.Array) -> jax.Array:
    """x in float32, or as it is where it is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def pick(values: jax.Array, ids: jax.Array) -> jax.Array:
    """values[..., ids]: [..., V], int [...] -> [...].

    As a sum over a comparison: it is part of whatever pass over the vocabulary is under way, its gradient is no
    scatter, and a vocabulary that is sharded stays where it is.
    """
    chosen = jnp.arange(values.shape[-1]) == ids[..., None]
    return jnp.sum(jnp.where(chosen, values, 0), axis=-1)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(z)[l]: logits [..., V], labels int [...] -> [...]."""
    logits = wide(logits)
    return jax.nn.logsumexp(logits, axis=-1) - pick(logits, labels)


def kl_divergence(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    """KL(q || p) = sum_v q_v (log q_v - log p_v) >= 0: two [..., V] -> [...]. Tokens with q_v = 0 count nothing."""
    log_p, log_q = (jax.nn.log_softmax(wide(x), axis=-1) for x in (draft_logits, target_logits))
    q = jnp.exp(log_q)
    return jnp.sum(jnp.where(q > 0, q * (log_q - log_p), 0), axis=-1)


def _law(logits: jax.Array, log_normalizer: jax.Array | None = None) -> jax.Array:
    # Through the log-sum-exp, so that the quotient needs no pass of its own.
    logits = wide(logits)
    if log_normalizer is None:
        log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - log_normalizer[..., None])


@jax.custom_jvp
def l1_distance(
    draft_logits: jax.Array, target_logits: jax.Array, log_normalizer: jax.Array | None = None
) -> jax.Array:
    """sum_v |p_v - q_v|, in [0, 2]: two [..., V] -> [...].

    log_normalizer: [...], of the target's law over all its tokens, where V holds only some of them: q = exp(y - it),
    and what q gives the other tokens, 1 - sum_v q_v, is part of the distance. None: q = softmax(y).

    The derivative is given by hand, with s = sign(p - q) and sign(0) = 0:

        dl1 = sum_v p_v (s_v - sum_u s_u p_u) dz_v - (the same with q and y)        without log_normalizer
        dl1 = sum_v p_v (s_v - sum_u s_u p_u) dz_v - sum_v q_v (s_v + 1) (dy_v - d log_normalizer)       with it

    Differentiated operation by operation it keeps two more arrays of the size of the logits.
    """
    p, q = _law(draft_logits), _law(target_logits, log_normalizer)
    inside = jnp.sum(jnp.abs(p - q), axis=-1)
    return inside if log_normalizer is None else inside + 1 - jnp.sum(q, axis=-1)


@l1_distance.defjvp
def _l1_distance_jvp(primals, tangents):
    draft_logits, target_logits, log_normalizer = primals
    dz, dy, normalizer_tangent = tangents
    p, q = _law(draft_logits), _law(target_logits, log_normalizer)
    s = jnp.sign(p - q)
    tangent = jnp.sum(p * (s - jnp.sum(s * p, axis=-1, keepdims=True)) * dz, axis=-1)
    if log_normalizer is None:
        tangent -= jnp.sum(q * (s - jnp.sum(s * q, axis=-1, keepdims=True)) * dy, axis=-1)
    else:
        tangent -= jnp.sum(q * (s + 1) * (dy - normalizer_tangent[..., None]), axis=-1)
    return l1_distance(draft_logits, target_logits, log_normalizer), tangent.astype(p.dtype)


def accept_rate(l1: jax.Array) -> jax.Array:
    """alpha = clamp(1 - l1 / 2, 0, 1), the chance that a token drawn from the draft law is accepted: [...] -> [...]."""
    return jnp.clip(1 - l1 / 2, 0, 1)


def accept_rate_among(
    draft_logits: jax.Array, chosen: jax.Array, target_logits: jax.Array, log_normalizer: jax.Array | None = None
) -> jax.Array:
    """sum_v min(p_v, q_v) with p = softmax of z over the chosen tokens only: how often a draw among them is accepted.

    Logits and log_normalizer as in `l1_distance`, chosen bool [..., V] -> [...].
    """
    p = jax.nn.softmax(jnp.where(chosen, wide(draft_logits), -jnp.inf), axis=-1)
    return jnp.sum(jnp.minimum(p, _law(target_logits, log_normalizer)), axis=-1)
