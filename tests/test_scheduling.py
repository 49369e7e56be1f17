"""Prefix lengths: against brute force, against a loop that follows the paper's algorithm line by line, and, by adding
up every possible round, against the law of the target."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import scheduling
from dspark_jax.scheduling import schedule_prefixes

THREE = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.95, 0.9, 0.5]])
SLOWER = 1 / (1 + 0.05 * np.arange(13))


def lengths_of(*arguments, **options):
    return schedule_prefixes(*arguments, **options).tolist()


# ------------------------------------------------------------- slow versions


def slow_objective(confidence, lengths, speeds, active=None):
    expected = tokens = 0
    for r, row in enumerate(confidence):
        if active is None or active[r]:
            expected += 1 + sum(np.prod(row[: t + 1]) for t in range(lengths[r]))
            tokens += 1 + lengths[r]
    return expected * speeds[tokens]


def slow_causal(confidence, speeds):
    """Algorithm 1 of the paper: one candidate after the other, until one does not raise the objective."""
    R, T = confidence.shape
    pool = [(-np.prod(confidence[r, : t + 1]), t, r) for r in range(R) for t in range(T)]
    lengths, tokens, expected = [0] * R, R, float(R)
    best = expected * speeds[tokens]
    for negative, t, r in sorted(candidate for candidate in pool if candidate[0] < 0):
        tokens, expected = tokens + 1, expected - negative
        if expected * speeds[tokens] <= best:
            break
        best, lengths[r] = expected * speeds[tokens], t + 1
    return lengths


def brute_force(confidence, speeds):
    """The largest objective of all lengths."""
    R, T = confidence.shape
    gains = np.concatenate([np.zeros((R, 1)), np.cumsum(np.cumprod(confidence, axis=-1), axis=-1)], axis=-1)
    every = np.array(list(itertools.product(range(T + 1), repeat=R)))
    expected = R + gains[np.arange(R), every].sum(-1)
    return np.max(expected * speeds[R + every.sum(-1)])


def objectives_along_the_ranking(confidence, speeds):
    a = -np.sort(-np.cumprod(confidence, axis=-1).ravel())
    expected = len(confidence) + np.concatenate([[0], np.cumsum(a)])
    return expected * speeds[len(confidence) + np.arange(a.size + 1)]


def has_one_peak(values):
    top = np.argmax(values)
    return np.all(np.diff(values[: top + 1]) > 0) and np.all(np.diff(values[top:]) <= 0)


# ------------------------------------------------------------------- lengths


def test_three_requests_by_hand():
    assert lengths_of(THREE, SLOWER) == [3, 2, 3]
    assert lengths_of(THREE, SLOWER, "lagged", earlier=THREE) == [3, 2, 3]
    value = scheduling.objective(jnp.array(THREE), jnp.array([3, 2, 3]), jnp.array(SLOWER))
    assert float(value) == pytest.approx(5.32677, abs=5e-6)
    assert slow_objective(THREE, [3, 2, 3], SLOWER) == pytest.approx(float(value), rel=1e-6)
    assert int(scheduling.capacity(jnp.array(THREE), jnp.array(SLOWER))) == 8


@pytest.mark.parametrize("second", [0.0, 0.3, 0.9, 1.0])
def test_the_walk_stops_at_the_first_draft_that_does_not_pay(second):
    """The paper's counter-example: the second draft might pay for the first one, but it knows the first one."""
    speeds, confidence = np.array([9.0, 1.0, 0.5, 0.45]), np.array([[0.8, second]])
    assert lengths_of(confidence, speeds) == [0]
    assert int(scheduling.capacity(jnp.array(confidence), jnp.array(speeds))) == (2 if second >= 0.9 else 0)


@pytest.mark.parametrize("R, T", [(1, 1), (1, 4), (2, 3), (3, 2), (4, 1), (4, 4)])
def test_nothing_beats_the_causal_mode_where_there_is_one_peak(R, T):
    """1,008 random cases over all sizes: concave curves, which have one peak each, and as many of any falling shape."""
    rng, N = np.random.default_rng(10 * R + T), R * (T + 1)
    concave = 1 - rng.uniform(0, 1, (168, 1)) * np.arange(N + 1) ** rng.uniform(1, 3, (168, 1)) / N**3
    falling = -np.sort(-rng.uniform(0.2, 1, (168, N + 1)), axis=-1)
    run = jax.jit(jax.vmap(lambda c, s: (schedule_prefixes(c, s), scheduling.capacity(c, s))))
    peaks = 0
    for speeds in (concave, falling):
        confidence = rng.uniform(0, 1, (168, R, T)) ** rng.uniform(0.1, 1, (168, 1, 1))
        lengths, capacities = map(np.asarray, run(confidence.astype(np.float32), speeds.astype(np.float32)))
        for c, s, chosen, K in zip(confidence, speeds, lengths, capacities):
            assert chosen.tolist() == slow_causal(c, s)
            along, best = objectives_along_the_ranking(c, s), brute_force(c, s)
            assert along[K] == pytest.approx(best, rel=1e-6)
            if has_one_peak(along):
                assert slow_objective(c, chosen, s) == pytest.approx(best, rel=1e-6)
                peaks += 1
            else:
                assert speeds is falling
    assert peaks >= 168


def test_equal_candidates_go_by_position_and_then_by_row():
    ones, enough = np.ones((3, 3)), np.ones(13)
    assert lengths_of(ones, enough) == [3, 3, 3]
    for K, lengths in ((1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (7, [3, 2, 2]), (20, [3, 3, 3])):
        assert scheduling.admit(jnp.array(ones), K).tolist() == lengths
        capped = np.where(np.arange(13) <= 3 + K, 1.0, 0.1)
        assert lengths_of(ones, capped) == lengths and lengths_of(ones, capped, "lagged", earlier=ones) == lengths
    # A sure draft ranks behind the equal one it rests on, and before a worse one of another row.
    assert scheduling.admit(jnp.array([[0.5, 1.0], [0.4, 1.0]]), 3).tolist() == [2, 1]


def test_survival_never_grows_even_where_rounding_would_make_it():
    c = np.random.default_rng(0).uniform(0.9999, 1, (2000, 17)).astype(np.float32)
    a = np.asarray(scheduling.survival(jnp.array(c)))
    np.testing.assert_allclose(a, np.cumprod(c.astype(np.float64), axis=-1), rtol=1e-5)
    assert np.all(np.diff(a, axis=-1) <= 0)


def test_a_draft_without_a_chance_is_never_admitted():
    c = np.array([[0.0, 1.0], [0.5, 0.0]])
    growing = 1.0 + np.arange(7)  # where every token would be welcome
    assert lengths_of(c, growing) == [0, 1] and lengths_of(c, growing, "lagged", earlier=np.ones((2, 2))) == [0, 1]
    assert int(scheduling.capacity(jnp.array(c), jnp.array(growing))) == 1


def test_rows_that_are_done_cost_and_promise_nothing():
    rng = np.random.default_rng(1)
    active = np.array([True, False, True, False, True])
    speeds = 1 / (1 + 0.1 * np.arange(5 * 4 + 1))
    for _ in range(5):
        c, earlier = rng.uniform(size=(2, 5, 3))
        modes = {"causal": {"steps_per_second": speeds}, "lagged": {"steps_per_second": speeds, "earlier": earlier},
                 "static": {"length": 2}, "threshold": {"threshold": 0.4}}
        for mode, options in modes.items():
            some = {k: v[active] if k == "earlier" else v for k, v in options.items()}
            got = np.array(lengths_of(c, mode=mode, active=active, **options))
            assert got[active].tolist() == lengths_of(c[active], mode=mode, **some) and not got[~active].any()
            value = scheduling.objective(jnp.array(c), jnp.array(got), jnp.array(speeds), jnp.array(active))
            assert float(value) == pytest.approx(slow_objective(c, got, speeds, active), rel=1e-6)
    assert lengths_of(c, speeds, active=np.zeros(5, bool)) == [0] * 5


def test_lagged_takes_the_number_from_before_and_the_candidates_from_now():
    earlier = np.array([[0.9, 0.9], [0.9, 0.9]])
    speeds = np.array([9, 1, 1, 0.9, 0.8, 0.1, 0.1])  # two drafts pay
    now = np.array([[0.01, 1.0], [0.02, 0.9]])
    assert lengths_of(now, speeds) == [0, 0]
    assert lengths_of(now, speeds, "lagged", earlier=earlier) == [0, 2]


def test_static_and_threshold():
    assert lengths_of(THREE, mode="static", length=2) == [2, 2, 2] and lengths_of(THREE, mode="static", length=0) == [0] * 3
    assert lengths_of(THREE, mode="threshold", threshold=0.5) == [3, 2, 3]
    assert lengths_of(THREE, mode="threshold", threshold=0.7) == [3, 0, 2]
    assert lengths_of(THREE, mode="threshold", threshold=0.0) == [3, 3, 3]


def test_every_mode_under_jit_and_vmap():
    rng = np.random.default_rng(2)
    c, earlier = rng.uniform(0.3, 1, (2, 6, 3, 4)).astype(np.float32)
    active = rng.uniform(size=(6, 3)) < 0.7
    speeds = jnp.array(1 / (1 + 0.05 * np.arange(16)), jnp.float32)
    for mode, option in (("causal", {}), ("lagged", {"earlier": earlier}), ("static", {"length": np.full(6, 3)}),
                         ("threshold", {"threshold": np.full(6, 0.6, np.float32)})):
        run = lambda c, a, o, mode=mode: schedule_prefixes(c, speeds, mode, active=a, **o)
        each = [run(c[i], active[i], {k: v[i] for k, v in option.items()}) for i in range(6)]
        together = jax.jit(jax.vmap(run))(c, active, option)
        np.testing.assert_array_equal(together, each)
        assert together.dtype == jnp.int32 and np.ptp(each) > 0


# ------------------------------------------------------------------ the curve


def test_envelope_by_hand():
    # Seconds 1 1 4 4 3.5 3.5: the line from (2, 1) to (6, 3.5) passes below the rest.
    speeds = np.array([7, 1, 1, 1 / 4, 1 / 4, 1 / 3.5, 1 / 3.5])
    np.testing.assert_allclose(1 / scheduling.monotone_envelope(speeds), [1, 1, 1, 1.625, 2.25, 2.875, 3.5])
    rising = scheduling.monotone_envelope([0, 1.0, 2.0, 1.0])  # one token takes no longer than two
    np.testing.assert_allclose(rising, [2, 2, 2, 1])
    np.testing.assert_allclose(scheduling.monotone_envelope(SLOWER)[1:], SLOWER[1:])  # convex seconds are left alone
    assert scheduling.monotone_envelope([5.0, 3.0]).tolist() == [3.0, 3.0]


def test_walking_along_the_envelope_finds_its_best_for_any_staircase():
    rng = np.random.default_rng(3)
    run = jax.jit(schedule_prefixes)
    stuck = 0
    for _ in range(200):
        sizes = np.unique(np.append(rng.integers(1, 15, rng.integers(1, 6)), 15))
        speeds = scheduling.table_from_buckets(sizes, rng.uniform(0.2, 1, sizes.size), 15)
        envelope = scheduling.monotone_envelope(speeds)
        assert np.all(np.diff(envelope) <= 1e-12) and np.all(envelope[1:] >= speeds[1:] - 1e-12)
        assert np.all(np.diff(1 / envelope[1:], 2) >= -1e-9)  # convex
        c = rng.uniform(0, 1, (3, 4)) ** 0.3
        chosen = np.asarray(run(c.astype(np.float32), envelope.astype(np.float32)))
        assert slow_objective(c, chosen, envelope) == pytest.approx(brute_force(c, envelope), rel=1e-6)
        stuck += slow_objective(c, slow_causal(c, speeds), speeds) < slow_objective(c, chosen, speeds) - 1e-6
    assert stuck > 10  # what the envelope is for: the walk along the staircase itself stops too early


def test_the_envelope_is_the_largest_such_curve():
    """The slow version: no point lies above any chord of the smallest seconds from there on."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        speeds = rng.uniform(0.2, 1, 9)
        seconds = [min(1 / speeds[b:]) for b in range(1, 9)]
        chords = [min([seconds[b]] + [
            seconds[i] + (seconds[j] - seconds[i]) * (b - i) / (j - i) for i in range(b) for j in range(b + 1, 8)])
            for b in range(8)]
        np.testing.assert_allclose(1 / scheduling.monotone_envelope(speeds)[1:], chords)


def test_table_from_buckets():
    np.testing.assert_array_equal(scheduling.table_from_buckets([2, 3, 6], [5, 4, 2.5], 5), [5, 5, 5, 4, 2.5, 2.5])
    for buckets, speeds, tokens, message in (
            ([2, 4], [1.0], 4, "buckets: shape"), ([4, 2], [1.0, 2.0], 2, "strictly increasing"),
            ([0, 2], [1.0, 2.0], 2, "from 1 on"), ([], [], 2, "at least one"),
            ([2, 4], [1.0, 2.0], 5, "the largest has 4 tokens; must be at least 5"),
            ([2, 4], [1.0, 0.0], 4, "steps_per_second: 0.0 for 3 tokens")):
        with pytest.raises(ValueError, match=message):
            scheduling.table_from_buckets(buckets, speeds, tokens)


# ------------------------------------------------- the law of what comes out


def first_token_law(q, p, length_after):
    """Exact law of the next token of one request: length_after(x) is how many drafts are verified once x is drafted."""
    law = np.zeros(len(p))
    for x in range(len(q)):
        if length_after(x) == 0:
            law += q[x] * p
            continue
        accepted = min(1, p[x] / q[x])
        rest = np.maximum(p - q, 0)
        law[x] += q[x] * accepted
        law += q[x] * (1 - accepted) * rest / max(rest.sum(), 1e-300)
    return law


def test_a_search_that_looks_back_biases_the_output_and_the_modes_do_not():
    """The paper's counter-example, added up over both first drafts."""
    q, p, speeds = np.array([0.5, 0.5]), np.array([0.7, 0.3]), jnp.array([9.0, 1.0, 0.5, 0.45])
    confidence = [jnp.array([[0.8, 0.9]]), jnp.array([[0.8, 0.0]])]  # the second one knows the first draft
    retrospective = lambda x: int(scheduling.admit(confidence[x], scheduling.capacity(confidence[x], speeds))[0])
    assert [retrospective(x) for x in (0, 1)] == [2, 0]
    np.testing.assert_allclose(first_token_law(q, p, retrospective), [0.85, 0.15])
    np.testing.assert_allclose(first_token_law(q, p, lambda x: lengths_of(confidence[x], speeds)[0]), p)
    for earlier, expected in ((confidence[0], [2, 1]), (confidence[1], [0, 0])):
        lagged = [lengths_of(c, speeds, "lagged", earlier=earlier)[0] for c in confidence]
        assert lagged == expected  # of two drafts, the second one without a chance is left out
        np.testing.assert_allclose(first_token_law(q, p, lagged.__getitem__), p)


def _problem(rng):
    """Two requests, two tokens, T = 2: target and draft laws of both positions, and confidences. First index: request."""
    some = lambda *shape: rng.uniform(0.05, 0.95, shape)
    law = lambda shape: np.stack([(first := some(*shape)), 1 - first], axis=-1)
    return {"p0": law((2,)), "p1": law((2, 2)), "q0": law((2,)), "q1": law((2, 2)), "c0": some(2), "c1": some(2, 2)}


def pair_law(z, lengths):
    """Exact law [2, 2, 2] of each request's next two tokens, where lengths[first drafts of both] is what is verified.
    Tokens that a round does not give come from the target."""
    law = np.zeros((2, 2, 2))
    for drafts in itertools.product(itertools.product(range(2), repeat=2), repeat=2):
        chance = np.prod([z["q0"][r, x] * z["q1"][r, x, y] for r, (x, y) in enumerate(drafts)])
        for r, ((x, y), n) in enumerate(zip(drafts, lengths[drafts[0][0], drafts[1][0]])):
            p0, p1, q0, q1 = z["p0"][r], z["p1"][r], z["q0"][r], z["q1"][r, x]
            afresh = p0[:, None] * p1
            if n == 0:
                law[r] += chance * afresh
                continue
            accept = min(1, p0[x] / q0[x])
            rest = np.maximum(p0 - q0, 0)
            if accept < 1:
                law[r] += chance * (1 - accept) * (rest / rest.sum())[:, None] * p1
            if n == 1:
                law[r, x] += chance * accept * p1[x]
                continue
            again = min(1, p1[x, y] / q1[y])
            rest = np.maximum(p1[x] - q1, 0)
            law[r, x, y] += chance * accept * again
            if again < 1:
                law[r, x] += chance * accept * (1 - again) * rest / rest.sum()
    return law


def _filled(confidence, speeds):
    """The causal walk, then as many candidates as fill up the compiled size: 2, 4 or 6 tokens."""
    return scheduling.fill_up(confidence, schedule_prefixes(confidence, speeds), jnp.array([2, 4, 6]))


def _kept_laws(confidence, speeds, envelope, earlier):
    """The lengths under every rule that should keep the law, and under one that looks back."""
    return (
        schedule_prefixes(confidence, speeds),
        schedule_prefixes(confidence, envelope),
        _filled(confidence, speeds),
        schedule_prefixes(confidence, speeds, "lagged", earlier=earlier),
        schedule_prefixes(confidence, mode="static", length=1),
        schedule_prefixes(confidence, mode="threshold", threshold=0.5),
        schedule_prefixes(confidence, speeds, "lagged", earlier=confidence),
    )


def test_every_mode_keeps_the_target_law_for_confidences_that_know_the_drafts():
    rng = np.random.default_rng(5)
    run = jax.jit(_kept_laws)
    biased, seen = 0, [set() for _ in range(7)]
    for _ in range(20):
        z = _problem(rng)
        # Half of the curves fall deep at first and then hardly any more, so that looking back pays.
        drops = rng.uniform(0.7, 1, 4) if rng.uniform() < 0.5 else [rng.uniform(0.5, 0.75), 0.98, 0.98, 0.98]
        speeds = np.append([1, 1, 1], np.cumprod(drops))
        envelope, earlier = scheduling.monotone_envelope(speeds), rng.uniform(size=(2, 2))
        lengths = {}  # of every rule, by the first drafts, on which the confidences depend
        for x in itertools.product(range(2), repeat=2):
            confidence = np.array([[z["c0"][r], z["c1"][r, x[r]]] for r in range(2)])
            lengths[x] = [tuple(each.tolist()) for each in run(confidence, speeds, envelope, earlier)]
        laws = [pair_law(z, {x: rules[i] for x, rules in lengths.items()}) for i in range(7)]
        for law in laws[:-1]:
            np.testing.assert_allclose(law, z["p0"][:, :, None] * z["p1"], atol=1e-12)
        biased += not np.allclose(laws[-1], z["p0"][:, :, None] * z["p1"], atol=1e-4)
        for rule, rules in zip(seen, zip(*lengths.values())):
            rule |= set(rules)
    assert biased >= 3
    assert len(seen.pop(4)) == 1 and min(map(len, seen)) >= 3  # all but the static one look at the confidences


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("arguments, options, message", [
    ([[[0.5, 1.1]], np.ones(4)], {}, r"confidence: 1.1; must be probabilities, in \[0, 1\]"),
    ([[[0.5, np.nan]], np.ones(4)], {}, "confidence: nan"),
    ([[[-0.1, 0.5]], np.ones(4)], {}, "confidence: -0.1"),
    ([[0.5, 0.5], np.ones(4)], {}, "confidence: shape"),
    ([np.zeros((0, 2)), np.ones(4)], {}, "confidence: shape"),
    ([THREE], {}, "steps_per_second: missing; the mode 'causal' needs it"),
    ([THREE, []], {}, "steps_per_second: shape"),
    ([THREE, np.ones(12)], {}, "steps_per_second: 12 entries.*at least 13"),
    ([THREE, np.append(np.ones(12), 0)], {}, "steps_per_second: 0.0 for 12 tokens; must be positive"),
    ([THREE, np.append(np.ones(12), np.nan)], {}, "steps_per_second: nan for 12 tokens"),
    ([THREE, SLOWER, "greedy"], {}, "mode: unknown name 'greedy'; allowed: causal, lagged, static, threshold"),
    ([THREE, SLOWER, "lagged"], {}, "earlier: missing"),
    ([THREE, SLOWER, "lagged"], {"earlier": THREE[:2]}, r"earlier: shape \(2, 3\)"),
    ([THREE, SLOWER, "lagged"], {"earlier": THREE + 1}, "earlier: 1.9"),
    ([THREE, SLOWER], {"earlier": THREE}, "earlier: the mode 'causal' has no use for it"),
    ([THREE, SLOWER], {"active": np.ones(2, bool)}, r"active: shape \(2,\)"),
    ([THREE, None, "static"], {}, "length: missing"),
    ([THREE, None, "static"], {"length": 4}, r"length: 4; must be an integer in \[0, 3\]"),
    ([THREE, None, "static"], {"length": 1.5}, "length: 1.5"),
    ([THREE, None, "threshold"], {"threshold": np.nan}, r"threshold: nan; must be a number in \[0, 1\]"),
])
def test_bad_input(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        schedule_prefixes(*arguments, **options)


def test_shapes_are_checked_under_jit_too():
    with pytest.raises(ValueError, match="at least 13"):
        jax.jit(schedule_prefixes)(THREE, np.ones(12))


def test_the_first_entry_of_the_curve_is_never_read():
    for first in (0.0, np.nan, -1.0, 1e9):
        assert lengths_of(THREE, np.append(first, SLOWER[1:])) == [3, 2, 3]
