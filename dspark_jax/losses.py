"""Training objectives of a block drafter, as sums that can be added up over chunks and devices before they are divided.

With draft logits z (after the transition term), target logits y, labels l, a mask m of supervised drafts and weights
w_t = m_t exp(-t / decay), the terms of one draft are

    ce          -log softmax(z)[l]
    l1          sum_v | softmax(z)_v - softmax(y)_v |                    (not halved)
    confidence  binary cross-entropy of the confidence logit against the acceptance rate alpha, held constant
    alpha       1 - l1 / 2 = sum_v min(softmax(z)_v, softmax(y)_v)       the chance that a draw from z survives y

and a loss is  sum_k weight_k * (sum w x_k) / (sum w + 1e-6). The sums run over every device and every chunk:
`drafter_terms` returns numerators and denominators, which are added with `jax.tree.map(jnp.add, ...)` or `jax.lax.psum`,
and `combine_terms` divides once. `drafter_loss` is the two in a row. Terms are computed in float32 or wider.

Shape letters: T draft positions, V vocabulary of the draft logits, M candidates per position; "..." leading axes (batch,
anchors).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EPSILON = 1e-6  # in the loss only: a batch without supervised drafts gives 0 instead of 0/0


class Ratio(NamedTuple):
    """A mean that is not divided yet."""

    numerator: jax.Array
    denominator: jax.Array

    def loss(self) -> jax.Array:
        """numerator / (denominator + 1e-6)."""
        return self.numerator / (self.denominator + EPSILON)

    def metric(self) -> jax.Array:
        """numerator / denominator, and 0 where the denominator is 0."""
        empty = self.denominator == 0
        return jnp.where(empty, 0.0, self.numerator / jnp.where(empty, 1.0, self.denominator))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _softmax(x: jax.Array) -> jax.Array:
    # Through the log-sum-exp, so that the quotient needs no pass of its own.
    x = _wide(x)
    return jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True))


def position_weights(mask: jax.Array, decay: float | None) -> jax.Array:
    """w_t = m_t exp(-t / decay): bool [..., T] -> float32 [..., T].

    decay is a Python number of positions; None or <= 0: no decay, w = m.
    """
    weights = mask.astype(jnp.float32)
    if decay is None or decay <= 0:
        return weights
    return weights * jnp.exp(-jnp.arange(mask.shape[-1], dtype=jnp.float32) / decay)


def weighted(weights: jax.Array, values: jax.Array, axis=None) -> Ratio:
    """sum w x and sum w over `axis` (default all). Values of weight 0 may be anything, infinities included."""
    values = jnp.where(weights > 0, values, 0.0)
    return Ratio(jnp.sum(weights * values, axis), jnp.sum(weights, axis))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(z)[l]: logits [..., V], labels int [...] -> [...]."""
    logits = _wide(logits)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@jax.custom_jvp
def l1_distance(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    """sum_v |p_v - q_v| with p = softmax(z), q = softmax(y), in [0, 2]: two [..., V] -> [...].

    Its derivative is given by hand, dl1 = sum_v p_v (s_v - sum_u s_u p_u) dz_v - (the same with q and y), with
    s = sign(p - q) and sign(0) = 0. Differentiated operation by operation it keeps two more arrays of the size of the
    logits and takes half as long again (CPU, V = 151,936: 85 ms against 57 ms for the gradient of the whole loss).
    """
    p, q = _softmax(draft_logits), _softmax(target_logits)
    return jnp.sum(jnp.abs(p - q), axis=-1)


@l1_distance.defjvp
def _l1_distance_jvp(primals, tangents):
    p, q = map(_softmax, primals)
    s = jnp.sign(p - q)
    dp, dq = (jnp.sum(x * (s - jnp.sum(s * x, axis=-1, keepdims=True)) * dx, axis=-1) for x, dx in zip((p, q), tangents))
    return jnp.sum(jnp.abs(p - q), axis=-1), (dp - dq).astype(p.dtype)


def accept_rate(l1: jax.Array) -> jax.Array:
    """alpha = clamp(1 - l1 / 2, 0, 1), the chance that a token drawn from the draft law is accepted: [...] -> [...]."""
    return jnp.clip(1 - l1 / 2, 0, 1)


def confidence_bce(confidence_logits: jax.Array, accept: jax.Array) -> jax.Array:
    """-alpha log sigmoid(c) - (1 - alpha) log(1 - sigmoid(c)), alpha held constant: two [...] -> [...]."""
    c, alpha = _wide(confidence_logits), jax.lax.stop_gradient(accept)
    return jax.nn.softplus(c) - alpha * c


def expected_accepted_length(accept: jax.Array, mask: jax.Array) -> jax.Array:
    """Tokens a block is expected to give, 1 + sum_j prod_{i<=j} alpha_i m_i, bonus token included: [..., T] -> [...]."""
    return 1 + jnp.sum(jnp.cumprod(accept * mask, axis=-1), axis=-1)


def drafter_terms(
    draft_logits: jax.Array,
    target_logits: jax.Array | None,
    labels: jax.Array,
    mask: jax.Array,
    confidence_logits: jax.Array | None,
    decay: float | None = 4.0,
) -> dict[str, Ratio]:
    """All terms and metrics of a batch (or of a part of it) as undivided sums.

    Args:
      draft_logits: [..., T, V], transition term included.
      target_logits: [..., T, V], aligned with the labels; None: every term that needs them is 0 over 0.
      labels: int [..., T].
      mask: bool [..., T], supervised drafts.
      confidence_logits: [..., T], or None: no confidence terms.
      decay: of the position weights, in positions.

    Returns: dict of `Ratio`:
      "ce", "l1", "confidence": weighted sums of the terms in the module docstring;
      "accept_rate": [T], alpha per position, not weighted;
      "expected_accepted_length": over blocks with a supervised draft;
      "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias": |s - alpha|, s - alpha and the difference of
      their running products along the block, weighted, with s = sigmoid(confidence logit).
    """
    leading = tuple(range(mask.ndim - 1))
    weights = position_weights(mask, decay)
    zero, zeros = jnp.zeros(()), jnp.zeros(mask.shape[-1])
    scalars = ("l1", "confidence", "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias")
    terms = {name: Ratio(zero, zero) for name in (*scalars, "expected_accepted_length")}
    terms["accept_rate"] = Ratio(zeros, zeros)
    terms["ce"] = weighted(weights, cross_entropy(draft_logits, labels))
    if target_logits is None:
        return terms

    l1 = l1_distance(draft_logits, target_logits)
    alpha = jax.lax.stop_gradient(accept_rate(l1))
    blocks = jnp.any(mask, axis=-1).astype(jnp.float32)
    terms["l1"] = weighted(weights, l1)
    terms["accept_rate"] = weighted(mask.astype(jnp.float32), alpha, leading)
    terms["expected_accepted_length"] = weighted(blocks, expected_accepted_length(alpha, mask))
    if confidence_logits is None:
        return terms

    terms["confidence"] = weighted(weights, confidence_bce(confidence_logits, alpha))
    s = jax.lax.stop_gradient(jax.nn.sigmoid(_wide(confidence_logits)))
    survival = jnp.cumprod(s * mask, axis=-1) - jnp.cumprod(alpha * mask, axis=-1)
    terms["confidence_abs_error"] = weighted(weights, jnp.abs(s - alpha))
    terms["confidence_bias"] = weighted(weights, s - alpha)
    terms["confidence_cumprod_bias"] = weighted(weights, survival)
    return terms


def combine_terms(
    terms: dict[str, Ratio], ce: float = 0.1, l1: float = 0.9, confidence: float = 1.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Divides the sums of `drafter_terms`: (ce * CE + l1 * L1 + confidence * CONF, metrics with the keys of `terms`).

    A weight that is the Python number 0 leaves its term out, so that its backward pass is not even traced.
    """
    weights = {"ce": ce, "l1": l1, "confidence": confidence}
    used = {name: w for name, w in weights.items() if not (isinstance(w, (int, float)) and w == 0)}
    loss = sum((w * terms[name].loss() for name, w in used.items()), jnp.zeros(()))
    return loss, {name: ratio.metric() for name, ratio in terms.items()}


def drafter_loss(
    draft_logits: jax.Array,
    target_logits: jax.Array | None,
    labels: jax.Array,
    mask: jax.Array,
    confidence_logits: jax.Array | None,
    ce: float = 0.1,
    l1: float = 0.9,
    confidence: float = 1.0,
    decay: float | None = 4.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """DSpark's objective; ce=1, l1=0, confidence=0 is DFlash's.

    Arguments as in `drafter_terms`, then the weights of the three terms. Returns the scalar loss and the metrics "ce",
    "l1", "confidence", "accept_rate" [T], "expected_accepted_length" (and the confidence errors), without the epsilon.
    """
    terms = drafter_terms(draft_logits, target_logits, labels, mask, confidence_logits, decay)
    return combine_terms(terms, ce=ce, l1=l1, confidence=confidence)


def locate_label(candidates: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether and where the label is a candidate: int [..., M], int [...] -> bool [...], int [...] (0 if missing)."""
    match = candidates == labels[..., None]
    return jnp.any(match, axis=-1), jnp.argmax(match, axis=-1)


def inject_label(
    scores: jax.Array, candidates: jax.Array, labels: jax.Array, label_scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Puts a missing label, with its own score, in the last candidate's place. Returns (scores, candidates) [..., M]."""
    found, _ = locate_label(candidates, labels)
    replace = ~found[..., None] & (jnp.arange(candidates.shape[-1]) == candidates.shape[-1] - 1)
    return (
        jnp.where(replace, label_scores[..., None], scores),
        jnp.where(replace, labels[..., None], candidates),
    )


def candidate_cross_entropy(
    scores: jax.Array,
    candidates: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    policy: str,
    label_scores: jax.Array | None = None,
) -> Ratio:
    """Cross-entropy of the label over the M candidates only, -log softmax_M(S)[l]: the Selector's training term.

    Args:
      scores: [..., T, M], S_t(a, b) with the true previous token a.
      candidates: int [..., T, M], best first.
      labels: int [..., T].
      weights: [..., T], from `position_weights`.
      policy: for a label that is no candidate. "exclude": the draft leaves numerator and denominator.
        "inject": the label takes the last candidate's place, with its own score.
      label_scores: [..., T], S_t(a, label); needed by "inject".

    Returns: `Ratio`. Raises ValueError for an unknown policy, or "inject" without `label_scores`.
    """
    if policy not in ("exclude", "inject"):
        raise ValueError(f"policy: unknown name {policy!r}; allowed: exclude, inject")
    if policy == "inject":
        if label_scores is None:
            raise ValueError('label_scores: None, but policy "inject" needs the scores [..., T] of the labels')
        scores, candidates = inject_label(scores, candidates, labels, label_scores)
    found, index = locate_label(candidates, labels)
    return weighted(weights * found, cross_entropy(scores, index))
