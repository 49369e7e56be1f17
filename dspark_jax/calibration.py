"""How far the confidence head can be believed, and the temperatures that make it so.

The chance that draft t survives is a_t = prod_{s <= t} sigmoid(z_s / tau_s), with z the confidence head's logits and one
temperature a position. Of many rounds it is known whether draft t survived: y_t = 1 where at least t + 1 drafts were
accepted. Sequential temperature scaling (DSpark paper) goes from left to right: tau_t is the one that makes a_t agree best
with y_t, given those before it.

A round that ended at an accepted stop token says nothing of the drafts behind it: `proposed` is how many positions a
round is counted for.

All of this is offline work on a few thousand numbers, in NumPy and float64.

Shape letters: N rounds, T draft positions.
"""

from typing import NamedTuple

import numpy as np

BINS = 20
GRID = 8.0 ** np.linspace(-1, 1, 121)  # temperatures tried first: 1/8 to 8, with 1 in their middle
_REFINEMENTS, _FINER = 2, 17  # then twice as many between the neighbours of the best one, evenly in the logarithm


class Reliability(NamedTuple):
    """Of each bin of predictions: ``lower`` and ``upper`` edge, ``count``, mean ``predicted`` and mean ``observed``
    (NaN where the bin is empty), all [bins]. The upper edge belongs to the next bin, and 1 to the last."""

    lower: np.ndarray
    upper: np.ndarray
    count: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray


def reliability(predicted, observed, bins: int = BINS) -> Reliability:
    """Bins of equal width: predicted [N] in [0, 1], observed [N] 0 or 1. Raises ValueError."""
    predicted, observed = _pairs(predicted, observed)
    if bins < 1:
        raise ValueError(f"bins: {bins}; must be at least 1")
    count, predictions, observations = _sums(predicted, observed, bins)
    edges = np.arange(bins + 1) / bins
    with np.errstate(invalid="ignore"):
        return Reliability(edges[:-1], edges[1:], count, predictions / count, observations / count)


def expected_calibration_error(predicted, observed, bins: int = BINS) -> float:
    """ECE = sum_bins (n_bin / N) |mean predicted - mean observed|, bins of equal width.

    predicted [N] in [0, 1], observed [N] 0 or 1. Raises ValueError.
    """
    rows = reliability(predicted, observed, bins)
    return float(np.nansum(rows.count * np.abs(rows.predicted - rows.observed)) / np.sum(rows.count))


def brier(predicted, observed) -> float:
    """mean (predicted - observed)^2: predicted [N] in [0, 1], observed [N] 0 or 1. Raises ValueError."""
    predicted, observed = _pairs(predicted, observed)
    return float(np.mean((predicted - observed) ** 2))


def auc(predicted, observed) -> float:
    """The chance that a draft that survived was given more than one that did not, ties counted half; NaN where all
    drafts have one fate.

    predicted [N] in [0, 1], observed [N] 0 or 1. Raises ValueError.
    """
    predicted, observed = _pairs(predicted, observed)
    _, index, count = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[index]  # 1-based, equal values share their mean rank
    positive = np.sum(observed)
    negative = observed.size - positive
    if not positive or not negative:
        return float("nan")
    return float((np.sum(rank[observed == 1]) - positive * (positive + 1) / 2) / (positive * negative))


def calibrated_probabilities(confidence_logits, temperatures=()) -> np.ndarray:
    """c_t = sigmoid(z_t / tau_t): logits [..., T], temperatures [T], or none for tau = 1 -> float64 [..., T].

    Raises ValueError where a position has no temperature, or one that is not positive.
    """
    logits = np.asarray(confidence_logits, np.float64)
    temperatures = np.asarray(temperatures, np.float64)
    if temperatures.size:
        check_temperatures(temperatures, logits.shape[-1])
        logits = logits / temperatures
    return 1 / (1 + np.exp(-np.clip(logits, -700, 700)))


def check_temperatures(temperatures, T: int) -> None:
    """Raises ValueError for anything but T positive numbers."""
    if np.shape(temperatures) != (T,):
        raise ValueError(f"temperatures: shape {np.shape(temperatures)}; must be one for each of {T} draft positions")
    bad = [t for t in temperatures if not 0 < t < np.inf]
    if bad:
        raise ValueError(f"temperatures: {bad[0]}; must be positive and finite")


def fit_sequential_temperatures(confidence_logits, accepted, proposed=None, bins: int = BINS) -> np.ndarray:
    """Sequential temperature scaling: the temperatures [T], float64.

    tau_t minimises the ECE of a_t against y_t with those before it fixed: the best of `GRID`, then of ever finer grids
    between its neighbours. Of equally good ones, that closest to 1.

    Args:
      confidence_logits: [N, T], of rounds that put all their drafts to verification.
      accepted: int [N], drafts accepted.
      proposed: int [N], positions >= proposed are not counted; None for T.
      bins: of the ECE.

    Raises: ValueError for logits that are not finite, counts out of range, and a position with fewer rounds than bins.
    """
    logits, accepted, proposed = _rounds(confidence_logits, accepted, proposed)
    if bins < 1:
        raise ValueError(f"bins: {bins}; must be at least 1")
    N, T = logits.shape
    temperatures, before = np.ones(T), np.ones(N)
    for t in range(T):
        seen = proposed > t
        if np.sum(seen) < bins:
            raise ValueError(f"confidence_logits: {np.sum(seen)} rounds for position {t + 1}; must be at least as many "
                             f"as bins, {bins}")
        z, survived = logits[seen, t], (accepted[seen] > t).astype(np.float64)

        def error(temperature, z=z, before=before[seen], survived=survived):
            count, predictions, observations = _sums(before * calibrated_probabilities(z / temperature), survived, bins)
            return np.sum(np.abs(predictions - observations)) / np.sum(count)

        temperatures[t] = _minimum(error)
        before = before * calibrated_probabilities(logits[:, t] / temperatures[t])
    return temperatures


def _minimum(error):
    grid = GRID
    for refinement in range(_REFINEMENTS + 1):
        errors = np.array([error(temperature) for temperature in grid])
        best = min(range(len(grid)), key=lambda i: (errors[i], abs(np.log(grid[i]))))
        if refinement < _REFINEMENTS:
            grid = np.geomspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], _FINER)
    return grid[best]


def by_position(confidence_logits, accepted, temperatures=(), proposed=None, bins: int = BINS) -> list[dict]:
    """How well a_t predicts y_t, for each position t: a dict of

    "count" of rounds, mean "predicted" and "observed", "ece", "auc", "brier", and "reliability", a `Reliability`.

    Arguments as `fit_sequential_temperatures`; temperatures [T], or none for 1. Raises ValueError.
    """
    logits, accepted, proposed = _rounds(confidence_logits, accepted, proposed)
    survival = np.cumprod(calibrated_probabilities(logits, temperatures), axis=-1)
    rows = []
    for t in range(logits.shape[-1]):
        seen = proposed > t
        if not np.any(seen):
            raise ValueError(f"confidence_logits: no round for position {t + 1}; must be at least one")
        predicted, observed = survival[seen, t], (accepted[seen] > t).astype(np.float64)
        rows.append({
            "count": int(np.sum(seen)),
            "predicted": float(np.mean(predicted)),
            "observed": float(np.mean(observed)),
            "ece": expected_calibration_error(predicted, observed, bins),
            "auc": auc(predicted, observed),
            "brier": brier(predicted, observed),
            "reliability": reliability(predicted, observed, bins),
        })
    return rows


def _sums(predicted, observed, bins):
    """Count, sum of predictions and sum of observations of each bin."""
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    return tuple(np.bincount(index, weights, bins) for weights in (None, predicted, observed))


def _pairs(predicted, observed):
    predicted, observed = np.asarray(predicted, np.float64), np.asarray(observed, np.float64)
    if predicted.ndim != 1 or predicted.shape != observed.shape or not predicted.size:
        raise ValueError(f"predicted and observed: shapes {predicted.shape} and {observed.shape}; must be equal, [N] with "
                         "N at least 1")
    bad = predicted[~((predicted >= 0) & (predicted <= 1))]
    if bad.size:
        raise ValueError(f"predicted: {bad[0]}; must be probabilities, in [0, 1]")
    bad = observed[(observed != 0) & (observed != 1)]
    if bad.size:
        raise ValueError(f"observed: {bad[0]}; must be 0 or 1")
    return predicted, observed


def _rounds(confidence_logits, accepted, proposed):
    logits = np.asarray(confidence_logits, np.float64)
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"confidence_logits: shape {logits.shape}; must be [rounds, draft positions], none of them 0")
    if not np.all(np.isfinite(logits)):
        raise ValueError(f"confidence_logits: {logits[~np.isfinite(logits)][0]}; must be finite")
    N, T = logits.shape
    counts = {"accepted": np.asarray(accepted), "proposed": np.full(N, T) if proposed is None else np.asarray(proposed)}
    for name, values in counts.items():
        if values.shape != (N,):
            raise ValueError(f"{name}: shape {values.shape}; must be {(N,)}, one for each round")
        bad = values[~((values >= 0) & (values <= T) & (values == np.round(values)))]
        if bad.size:
            raise ValueError(f"{name}: {bad[0]}; must be an integer in [0, {T}]")
    if np.any(counts["accepted"] > counts["proposed"]):
        raise ValueError("accepted: more drafts than were proposed")
    return logits, counts["accepted"], counts["proposed"]
