"""What a drafter is trained for: which terms of `dspark_jax.losses` count how much.

Shape letters: T draft positions, V vocabulary of the draft logits; "..." leading axes (batch, anchors).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dspark_jax.divergences import cross_entropy
from dspark_jax.losses import MISSING_LABEL, adaptive_weights, position_weights, supervised_blocks

POSITION_WEIGHTS = ("decay", "adaptive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What a drafter is trained for: weights of the terms in the module docstring, and how drafts and labels count.

    The defaults are DSpark's. DFlash: ce=1, l1=0, confidence=0. DFlash-2: unary=1, candidates=1, ce=0, l1=0,
    confidence=0. A term of weight 0 is not computed, or only as a metric.

    Attributes:
      ce, l1, confidence, unary, kl, candidates, expected_length: weights, at least 0, not all of them 0.
      decay: positions over which the weight of a draft falls by e; None or <= 0: all count the same.
      position_weights: "decay" or "adaptive", for all terms but confidence, which always has "decay".
      smoothing: of "adaptive", in (0, 1].
      missing_label: a label that is no candidate, in the candidates term: "exclude" or "inject"
        (`candidate_cross_entropy`).
      candidates_stop_gradient: the candidates term trains the transition alone, not what is before it.
      candidates_warmup: steps over which the weight of the candidates term rises linearly from 0.

    Raises ValueError for anything else.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    unary: float = 0.0
    kl: float = 0.0
    candidates: float = 0.0
    expected_length: float = 0.0
    decay: float | None = 4.0
    position_weights: str = "decay"
    smoothing: float = 0.5
    missing_label: str = "exclude"
    candidates_stop_gradient: bool = False
    candidates_warmup: int = 0

    def __post_init__(self):
        names = ("ce", "l1", "confidence", "unary", "kl", "candidates", "expected_length")
        for name in names:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"loss.{name}: {getattr(self, name)}; must be a finite number, at least 0")
        if not any(getattr(self, name) for name in names):
            raise ValueError(f"loss: every weight is 0; one of {', '.join(names)} must be positive")
        for name, allowed in (("position_weights", POSITION_WEIGHTS), ("missing_label", MISSING_LABEL)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"loss.{name}: unknown name {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"loss.smoothing: {self.smoothing}; must lie in (0, 1]")
        if self.candidates_warmup < 0:
            raise ValueError(f"loss.candidates_warmup: {self.candidates_warmup}; must be at least 0")

    def at(self, step: jax.Array | int) -> dict[str, jax.Array | float]:
        """Weight of each term (`weighted_sum`) at a step, 0 for the first; terms of weight 0 are left out."""
        weights = {name: getattr(self, name) for name in ("ce", "l1", "confidence", "unary", "kl", "candidates")}
        weights["expected_accepted_length"] = -self.expected_length
        weights = {name: weight for name, weight in weights.items() if weight}
        if "candidates" in weights and self.candidates_warmup:
            weights["candidates"] *= jnp.minimum(1.0, step / self.candidates_warmup)
        return weights


def draft_weights(weights: LossWeights, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """w as `weights.position_weights` says: logits [..., T, V], labels int and mask bool [..., T] -> [..., T]."""
    if weights.position_weights == "decay":
        return position_weights(mask, weights.decay)
    return adaptive_weights(jnp.exp(-cross_entropy(logits, labels)), mask, weights.smoothing)


def loss_denominators(weights: LossWeights, mask: jax.Array, reached: jax.Array) -> dict[str, jax.Array]:
    """What `weighted_sum` divides the terms of a batch by: both bool [..., T], of all of it, as in
    `losses.drafter_terms` -> float32 [] per term.

    The sum of the weights w; the number of blocks with a reached draft for `expected_accepted_length`, with a supervised
    one for every other term with adaptive weights. A label that is excluded from the candidates term leaves its numerator
    only.
    """
    drafts, blocks = jnp.sum(position_weights(mask, weights.decay)), jnp.sum(supervised_blocks(mask))
    shared = drafts if weights.position_weights == "decay" else blocks
    return dict.fromkeys(("ce", "unary", "l1", "kl", "candidates"), shared) | {
        "confidence": jnp.sum(position_weights(reached, weights.decay)),
        "expected_accepted_length": jnp.sum(supervised_blocks(reached))}
