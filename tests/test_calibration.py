"""Calibration: against sums written as loops, and on rounds that were drawn with known temperatures."""

import numpy as np
import pytest

from dspark_jax import calibration

PREDICTED, OBSERVED = [0.12, 0.62, 0.64, 0.93], [0, 1, 0, 1]


def slow_ece(predicted, observed, bins):
    error = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(predicted) if min(int(p * bins), bins - 1) == b]
        if inside:
            error += abs(sum(predicted[i] - observed[i] for i in inside)) / len(predicted)
    return error


def slow_auc(predicted, observed):
    pairs = [(p > n) + 0.5 * (p == n) for p, y in zip(predicted, observed) if y
             for n, other in zip(predicted, observed) if not other]
    return sum(pairs) / len(pairs)


def rounds(temperatures, N=20_000, seed=0):
    """Logits that say too much by the factors ``temperatures``, and how many drafts were accepted."""
    rng = np.random.default_rng(seed)
    T = len(temperatures)
    true = rng.normal(1.0, 1.5, (N, T)) + rng.normal(0, 0.5, (N, 1))
    accepted = np.sum(np.cumprod(rng.uniform(size=(N, T)) < 1 / (1 + np.exp(-true)), axis=-1), axis=-1)
    return true * temperatures, accepted


def test_metrics_by_hand():
    assert calibration.expected_calibration_error(PREDICTED, OBSERVED) == pytest.approx(0.1125)
    assert calibration.brier(PREDICTED, OBSERVED) == pytest.approx(0.143325)
    assert calibration.auc(PREDICTED, OBSERVED) == 0.75
    assert np.isnan(calibration.auc([0.1, 0.9], [1, 1]))
    assert calibration.auc([0.3, 0.3], [0, 1]) == 0.5
    # 0.25 is of the second of four bins, and 1 of the last.
    rows = calibration.reliability([0.0, 0.25, 0.3, 1.0], [0, 1, 0, 1], bins=4)
    assert rows.count.tolist() == [1, 2, 0, 1] and rows.upper.tolist() == [0.25, 0.5, 0.75, 1]
    np.testing.assert_allclose(rows.predicted, [0, 0.275, np.nan, 1])
    np.testing.assert_allclose(rows.observed, [0, 0.5, np.nan, 1])


def test_metrics_against_loops():
    rng = np.random.default_rng(0)
    for bins in (1, 7, 20):
        predicted = np.round(rng.uniform(size=150), 2)  # so that some are equal
        observed = (rng.uniform(size=150) < predicted**2).astype(int)
        assert calibration.expected_calibration_error(predicted, observed, bins) == pytest.approx(
            slow_ece(predicted, observed, bins))
        assert calibration.auc(predicted, observed) == pytest.approx(slow_auc(predicted, observed))


def test_calibrated_probabilities():
    logits = [[2.0, -3.0], [1000.0, -1000.0]]
    np.testing.assert_allclose(calibration.calibrated_probabilities(logits, [2.0, 3.0]),
                               [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], [1, 0]], atol=1e-100)
    np.testing.assert_allclose(calibration.calibrated_probabilities([0.5]), [1 / (1 + np.exp(-0.5))])


def test_known_temperatures_are_found_and_calibrate_rounds_not_seen():
    true = np.array([1.8, 0.6, 3.0])
    logits, accepted = rounds(true)
    fitted = calibration.fit_sequential_temperatures(logits, accepted)
    np.testing.assert_allclose(fitted, true, rtol=0.1)
    others = rounds(true, seed=1)
    before, after = calibration.by_position(*others), calibration.by_position(*others, fitted)
    assert max(row["ece"] for row in after) < 0.015 and min(row["ece"] for row in before) > 0.02
    assert all(b["brier"] > a["brier"] and b["count"] == 20_000 for b, a in zip(before, after))
    assert before[0]["auc"] == pytest.approx(after[0]["auc"])  # one temperature does not change an order


def test_each_temperature_is_the_best_given_those_before():
    """The slow version: many temperatures, one after the other, with the metric itself."""
    logits, accepted = rounds([2.5, 1.4], N=400)
    fitted = calibration.fit_sequential_temperatures(logits, accepted, bins=10)
    before = np.ones(400)
    for t in range(2):
        error = lambda temperature, t=t, before=before: calibration.expected_calibration_error(
            before * calibration.calibrated_probabilities(logits[:, t] / temperature), accepted > t, 10)
        best = min(error(x) for x in np.geomspace(1 / 8, 8, 400))
        assert error(fitted[t]) <= best + 0.002
        before = before * calibration.calibrated_probabilities(logits[:, t] / fitted[t])


def test_of_equally_good_temperatures_the_one_closest_to_1():
    certain = np.full((40, 1), 500.0)  # of any temperature: probability 1
    assert calibration.fit_sequential_temperatures(certain, np.ones(40, int)) == pytest.approx(1)


def test_drafts_behind_a_stop_token_are_not_counted():
    logits, accepted = rounds([1.5, 2.0], N=3000)
    proposed = np.where(np.arange(3000) < 300, 1, 2)
    accepted = np.minimum(accepted, proposed)
    logits[:300, 1] = 50.0
    fitted = calibration.fit_sequential_temperatures(logits, accepted, proposed)
    assert fitted[0] == calibration.fit_sequential_temperatures(logits[:, :1], np.minimum(accepted, 1))[0]
    assert abs(calibration.fit_sequential_temperatures(logits, accepted)[1] - fitted[1]) > 0.5
    rows = calibration.by_position(logits, accepted, proposed=proposed)
    assert [row["count"] for row in rows] == [3000, 2700]
    alone = calibration.by_position(logits[300:], accepted[300:])[1]
    assert all(rows[1][name] == alone[name] for name in ("observed", "ece", "auc", "brier"))
    logits[:300, 1] = -50.0
    assert calibration.fit_sequential_temperatures(logits, accepted, proposed).tolist() == fitted.tolist()


@pytest.mark.parametrize("arguments, options, message", [
    ([np.zeros((19, 2)), np.zeros(19, int)], {}, "19 rounds for position 1; must be at least as many as bins, 20"),
    ([np.zeros((25, 2)), np.zeros(25, int), np.arange(25) // 20 + 1], {}, "5 rounds for position 2"),
    ([np.full((30, 2), np.nan), np.zeros(30, int)], {}, "confidence_logits: nan; must be finite"),
    ([np.zeros(30), np.zeros(30, int)], {}, r"confidence_logits: shape \(30,\)"),
    ([np.zeros((30, 2)), np.zeros(29, int)], {}, r"accepted: shape \(29,\); must be \(30,\)"),
    ([np.zeros((30, 2)), np.full(30, 3)], {}, r"accepted: 3; must be an integer in \[0, 2\]"),
    ([np.zeros((30, 2)), np.full(30, 0.5)], {}, "accepted: 0.5"),
    ([np.zeros((30, 2)), np.ones(30, int), np.zeros(30, int)], {}, "accepted: more drafts than were proposed"),
    ([np.zeros((30, 2)), np.ones(30, int)], {"bins": 0}, "bins: 0; must be at least 1"),
])
def test_bad_rounds(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        calibration.fit_sequential_temperatures(*arguments, **options)


@pytest.mark.parametrize("function, arguments, message", [
    (calibration.expected_calibration_error, [[0.5, 1.5], [0, 1]], "predicted: 1.5"),
    (calibration.brier, [[0.5, np.nan], [0, 1]], "predicted: nan"),
    (calibration.auc, [[0.5, 0.5], [0, 0.5]], "observed: 0.5; must be 0 or 1"),
    (calibration.expected_calibration_error, [[0.5], [0, 1]], "shapes"),
    (calibration.brier, [[], []], "N at least 1"),
    (calibration.calibrated_probabilities, [np.zeros((3, 4)), [1.0, 1.0]], "temperatures: shape .* each of 4 draft"),
    (calibration.calibrated_probabilities, [np.zeros((3, 2)), [1.0, 0.0]], "temperatures: 0.0; must be positive"),
    (calibration.by_position, [np.zeros((3, 2)), [0, 0, 0], [1.0]], "temperatures: shape"),
    (calibration.by_position, [np.zeros((3, 2)), [0, 0, 0], [], [1, 1, 1]], "no round for position 2"),
])
def test_bad_metrics_input(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
