"""Training objectives of a block drafter, as sums that can be added up over chunks and devices before they are divided.

With draft logits z (after the transition term), base logits U, target logits y, labels l, a mask m of supervised
drafts, p = softmax(z), q = softmax(y) and a weight w_t per draft, the terms of a draft are

    ce            -log p(l)
    unary         -log softmax(U)(l)
    l1            sum_v |p_v - q_v|                                             (twice the total variation)
    kl            sum_v q_v log(q_v / p_v)
    candidates    -log softmax_M(S)(l), over the M best tokens of U only        (S = z at those tokens)
    confidence    binary cross-entropy of the confidence logit against alpha, held constant
    alpha         1 - l1 / 2 = sum_v min(p_v, q_v)                              the chance that a draw from p survives q

and that of a block is its expected accepted length E[tau] = 1 + sum_j prod_{i<=j} alpha_i m_i. A loss is

    sum_k weight_k (sum w x_k) / (sum w + 1e-6)  -  weight (sum over blocks of E[tau]) / (blocks + 1e-6)

The sums run over every device, micro-step and chunk. Terms are numerators and denominators (`Ratio`) that are added
with `jax.tree.map(jnp.add, ...)` or `jax.lax.psum`; `weighted_sum` and `metrics_of` divide once. The denominators of a
loss depend on the mask alone (`dspark_jax.loss_weights`), so they are known before any part of the batch is computed,
and the loss of the batch is then a plain sum over its parts.

Weights w_t of the drafts of a block: "decay" m_t exp(-t / decay), or "adaptive" (`adaptive_weights`).

Shape letters: T draft positions, V vocabulary of the draft logits, M candidates per position; "..." leading axes
(batch, anchors).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.divergences import accept_rate, cross_entropy, l1_distance, wide

EPSILON = 1e-6  # in the loss only: a batch without supervised drafts gives 0 instead of 0/0
MISSING_LABEL = ("exclude", "inject")  # what `candidate_cross_entropy` can do with a label that is no candidate


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


def position_weights(mask: jax.Array, decay: float | None) -> jax.Array:
    """w_t = m_t exp(-t / decay): bool [..., T] -> float32 [..., T].

    decay is a Python number of positions; None or <= 0: no decay, w = m.
    """
    weights = mask.astype(jnp.float32)
    if decay is None or decay <= 0:
        return weights
    return weights * jnp.exp(-jnp.arange(mask.shape[-1], dtype=jnp.float32) / decay)


def adaptive_weights(probability: jax.Array, mask: jax.Array, smoothing: float = 0.5) -> jax.Array:
    """Weights from what the drafter can do already, D-PACE (arXiv:2605.18810): two [..., T] -> [..., T], held constant.

        c_i = (1 - smoothing) p_i(l_i) + smoothing          w_j = m_j sum_{k>=j} prod_{i<=k} c_i m_i

    Without smoothing w_j is the derivative of sum_k prod_{i<=k} p_i(l_i), the accepted length, by log p_j(l_j): cross-
    entropy with these weights climbs it. Smoothing keeps the later drafts alive while the first ones are still bad. The
    sum of the weights is therefore not a measure of size to divide by: divide by the number of blocks.

    probability: p(label) under the drafter's law. Drafts behind an unsupervised one have weight 0.
    """
    confidence = (1 - smoothing) * probability + smoothing
    reached = jnp.cumprod(confidence * mask, axis=-1)
    return jax.lax.stop_gradient(jnp.flip(jnp.cumsum(jnp.flip(reached, axis=-1), axis=-1), axis=-1))


def supervised_blocks(mask: jax.Array) -> jax.Array:
    """1 for a block with a supervised draft, else 0: bool [..., T] -> float32 [...]."""
    return jnp.any(mask, axis=-1).astype(jnp.float32)


def weighted(weights: jax.Array, values: jax.Array, axis=None) -> Ratio:
    """sum w x and sum w over `axis` (default all). Values of weight 0 may be anything, infinities included."""
    values = jnp.where(weights > 0, values, 0.0)
    return Ratio(jnp.sum(weights * values, axis), jnp.sum(weights, axis))


def confidence_bce(confidence_logits: jax.Array, accept: jax.Array) -> jax.Array:
    """-alpha log sigmoid(c) - (1 - alpha) log(1 - sigmoid(c)), alpha held constant: two [...] -> [...]."""
    c, alpha = wide(confidence_logits), jax.lax.stop_gradient(accept)
    return jax.nn.softplus(c) - alpha * c


def expected_accepted_length(accept: jax.Array, mask: jax.Array) -> jax.Array:
    """Tokens expected of a block, 1 + sum_j prod_{i<=j} alpha_i m_i, bonus token included: two [..., T] -> [...]."""
    return 1 + jnp.sum(jnp.cumprod(accept * mask, axis=-1), axis=-1)


def drafter_terms(
    draft_logits: jax.Array,
    target_logits: jax.Array | None,
    labels: jax.Array,
    mask: jax.Array,
    confidence_logits: jax.Array | None,
    decay: float | None = 4.0,
    *,
    weights: jax.Array | None = None,
    log_normalizer: jax.Array | None = None,
    reached: jax.Array | None = None,
    accept: jax.Array | None = None,
) -> dict[str, Ratio]:
    """DSpark's terms and metrics of a batch (or of a part of it) as undivided sums.

    Args:
      draft_logits: [..., T, V], transition term included.
      target_logits: [..., T, V], aligned with the labels; None: every term that needs them is 0 over 0.
      labels: int [..., T].
      mask: bool [..., T], supervised drafts.
      confidence_logits: [..., T], or None: no confidence terms.
      decay: of the position weights, in positions.
      weights: [..., T], of "ce" and "l1"; None: the position weights.
      log_normalizer: [..., T], log sum_v exp(y_v) over all tokens of the target, where the V of the logits are only
        some of them (`dspark_jax.divergences`); None: they are all.
      reached: bool [..., T], drafts that verification can come to, whatever their own label is: over these go accept
        rates, accepted length and confidence. A label outside the draft vocabulary is in no term of its own, but what the
        drafter proposes there is rejected, which its confidence must know. None: those of ``mask``.
      accept: [..., T], alpha where drafts are not drawn from all tokens (`divergences.accept_rate_among`); None: they are.

    Returns: dict of `Ratio`:
      "ce", "l1", "confidence": weighted sums of the terms in the module docstring;
      "accept_rate": [T], alpha per position, not weighted;
      "expected_accepted_length": over blocks with a reached draft, differentiable;
      "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias": |s - alpha|, s - alpha and the difference of
      their running products along the block, weighted, with s = sigmoid(confidence logit).
    """
    leading = tuple(range(mask.ndim - 1))
    weights = position_weights(mask, decay) if weights is None else weights
    reached = mask if reached is None else reached
    zero, zeros = jnp.zeros(()), jnp.zeros(mask.shape[-1])
    scalars = ("l1", "confidence", "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias")
    terms = {name: Ratio(zero, zero) for name in (*scalars, "expected_accepted_length")}
    terms["accept_rate"] = Ratio(zeros, zeros)
    terms["ce"] = weighted(weights, cross_entropy(draft_logits, labels))
    if target_logits is None:
        return terms

    l1 = l1_distance(draft_logits, target_logits, log_normalizer)
    alpha = accept_rate(l1) if accept is None else accept
    terms["l1"] = weighted(weights, l1)
    terms["accept_rate"] = weighted(reached.astype(jnp.float32), alpha, leading)
    terms["expected_accepted_length"] = weighted(supervised_blocks(reached), expected_accepted_length(alpha, reached))
    if confidence_logits is None:
        return terms

    position = position_weights(reached, decay)
    terms["confidence"] = weighted(position, confidence_bce(confidence_logits, alpha))
    s = jax.nn.sigmoid(wide(confidence_logits))
    survival = jnp.cumprod(s * reached, axis=-1) - jnp.cumprod(alpha * reached, axis=-1)
    terms["confidence_abs_error"] = weighted(position, jnp.abs(s - alpha))
    terms["confidence_bias"] = weighted(position, s - alpha)
    terms["confidence_cumprod_bias"] = weighted(position, survival)
    return terms


def weighted_sum(
    terms: Mapping[str, Ratio],
    weights: Mapping[str, jax.Array | float],
    denominators: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """The loss: sum_k weight_k numerator_k / (denominator_k + 1e-6).

    A weight that is the Python number 0 leaves its term out, so that its backward pass is not even traced.
    denominators: of the terms with a weight, where `terms` are of a part of the batch and the denominators are known
    for all of it (`dspark_jax.loss_weights.loss_denominators`); None: those of the terms.
    """
    loss = jnp.zeros(())
    for name, weight in weights.items():
        if not (isinstance(weight, (int, float)) and weight == 0):
            ratio = terms[name] if denominators is None else Ratio(terms[name].numerator, denominators[name])
            loss += weight * ratio.loss()
    return loss


def metrics_of(terms: Mapping[str, Ratio]) -> dict[str, jax.Array]:
    """Every term divided by its own denominator, without the epsilon."""
    return {name: ratio.metric() for name, ratio in terms.items()}


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
    """DSpark's objective; ce=1, l1=0, confidence=0 is DFlash's, cross-entropy with decay.

    Arguments as in `drafter_terms`, then the weights of the three terms. Returns the scalar loss and the metrics "ce",
    "l1", "confidence", "accept_rate" [T], "expected_accepted_length" (and the confidence errors), without the epsilon.
    """
    terms = drafter_terms(draft_logits, target_logits, labels, mask, confidence_logits, decay)
    return weighted_sum(terms, {"ce": ce, "l1": l1, "confidence": confidence}), metrics_of(terms)


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
    if policy not in MISSING_LABEL:
        raise ValueError(f"policy: unknown name {policy!r}; allowed: {', '.join(MISSING_LABEL)}")
    if policy == "inject":
        if label_scores is None:
            raise ValueError('label_scores: None, but policy "inject" needs the scores [..., T] of the labels')
        scores, candidates = inject_label(scores, candidates, labels, label_scores)
    found, index = locate_label(candidates, labels)
    return weighted(weights * found, cross_entropy(scores, index))
