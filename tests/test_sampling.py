import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import slow
from dspark_jax import sampling
from dspark_jax.sampling import probabilities
from golden import close, load


def slow_probabilities(logits, temperature, top_k=0, top_p=1.0):
    """One row, token by token."""
    logits = np.asarray(logits, np.float64)
    order = slow.top(logits, len(logits))
    if temperature == 0:
        return np.eye(len(logits))[order[0]]
    if top_k:
        order = order[:top_k]
    p = slow.softmax(logits[order] / temperature)
    out, before = np.zeros(len(logits)), 0.0
    for token, mass in zip(order, p):
        if before < top_p:
            out[token] = mass
        before += mass
    return out / out.sum()


GOLDEN_FILTERS = {
    "t06_k20_p08": (0.6, 20, 0.8),
    "t06": (0.6, 0, 1.0),
    "t1_k20": (1.0, 20, 1.0),
    "t1_p08": (1.0, 0, 0.8),
    "t15_k5_p05": (1.5, 5, 0.5),
}


@pytest.mark.parametrize("name", GOLDEN_FILTERS)
def test_golden_filters(name):
    z = load("dflash/rejection")
    p = probabilities(z["filter_logits"], *GOLDEN_FILTERS[name])
    close(p, z[f"filter_probs_{name}"])
    np.testing.assert_array_equal(p > 0, z[f"filter_probs_{name}"] > 0)
    if name == "t06_k20_p08":
        np.testing.assert_array_equal((p > 0).sum(-1), z["p_filtered_row_support"])
        close(probabilities(z["filtered_target_logits"], 0.6, 20, 0.8), z["filtered_target_probs"])


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.7), (6, 0.5), (100, 1.0), (1, 1.0), (0, 1e-9)])
def test_against_loops(top_k, top_p):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 20)).astype(np.float32) * 2
    logits[0] = np.round(logits[0])  # equal logits: those with smaller ids are kept
    logits[1, :, 7] = -np.inf
    f = jax.jit(lambda x, t: probabilities(x, t, top_k, top_p))
    for temperature in (0.0, 0.5, 1.0, 2.0):
        expected = [[slow_probabilities(row, temperature, top_k, top_p) for row in rows] for rows in logits]
        close(f(logits, temperature), np.array(expected), message=f"traced {temperature}")
        close(probabilities(logits, temperature, top_k, top_p), np.array(expected), message=f"Python {temperature}")
    assert f(logits.astype(jnp.bfloat16), 1.0).dtype == jnp.float32


def test_temperature_zero_and_nearly_zero():
    logits = np.array([[1.0, 5.0, 5.0, -np.inf], [-3e38, -3e38, -np.inf, -np.inf], [1e30, 2e30, 0, 0]], np.float32)
    best = np.eye(4)[[1, 0, 1]]
    for top_k, top_p in ((0, 1.0), (2, 0.9)):
        f = jax.jit(lambda t: probabilities(logits, t, top_k, top_p))
        np.testing.assert_array_equal(f(0.0), best)
        for tiny in (1e-30, 1e-38, 1e-42):  # the last is not a normal number
            p = f(tiny)
            assert np.isfinite(p).all() and (p[:, 3] == 0).all()
            np.testing.assert_allclose(p.sum(-1), 1)


def test_one_temperature_per_row():
    logits = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    temperatures = np.array([0.0, 0.5, 2.0], np.float32)
    expected = [slow_probabilities(row, t) for row, t in zip(logits, temperatures)]
    close(probabilities(logits, temperatures), np.array(expected))


@pytest.mark.parametrize(
    "setting, message",
    [
        ((-0.1, 0, 1.0), "temperature: got -0.1; allowed: finite numbers >= 0"),
        ((float("nan"), 0, 1.0), "temperature: got nan"),
        ((float("inf"), 0, 1.0), "temperature: got inf"),
        ((1.0, -1, 1.0), "top_k: got -1; allowed: whole numbers >= 0"),
        ((1.0, 2.5, 1.0), "top_k: got 2.5"),
        ((1.0, 0, 0.0), "top_p: got 0.0; allowed: 0 < top_p <= 1"),
        ((1.0, 0, 1.1), "top_p: got 1.1"),
    ],
)
def test_check_sampling(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampling.check_sampling(*setting)
    for allowed in ((0.0,), (0.7, 20, 0.8), (2, 0, 1)):
        sampling.check_sampling(*allowed)


def test_draws_follow_the_probabilities():
    p = np.array([0.0, 0.4, 0.0, 0.3, 0.2, 0.1, 0.0])
    draws = np.asarray(sampling.draw(jax.random.key(0), jnp.broadcast_to(p.astype(np.float32), (200_000, 7))))
    assert draws.dtype == np.int32
    counts = np.bincount(draws, minlength=7)
    possible = p > 0
    assert counts[~possible].sum() == 0
    assert scipy.stats.chisquare(counts[possible], 200_000 * p[possible]).pvalue > 1e-3


def test_impossible_tokens_are_never_drawn(monkeypatch):
    """Not even by the largest and smallest u, nor where rounding makes the running sum fall short or pass its end."""
    rng = np.random.default_rng(0)
    p = rng.random((50, 1000)).astype(np.float32) * (rng.random((50, 1000)) < 0.1)
    p[:, :3] = p[:, -3:] = 0
    for u in (0.0, 1.0 - 2.0**-24, 1.0, 2.0):
        monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, u, dtype))
        tokens = np.asarray(sampling.draw(jax.random.key(0), jnp.asarray(p)))
        assert (np.take_along_axis(p, tokens[:, None], 1) > 0).all()


def test_draw_of_a_one_hot_law_is_certain():
    p = jnp.eye(9, dtype=jnp.float32)
    np.testing.assert_array_equal(sampling.draw(jax.random.key(5), p), np.arange(9))
