"""Sampled decoding, end to end: the joint law of the first three tokens is the target's, whatever drafts and verifies.

The target is so small that the law of every continuation can be read off, and a sample of 200,000 prompts is one batch.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dspark_jax as ds
import pairs
from dspark_jax import generation, verification
from dspark_jax.drafter import with_successors
from dspark_jax.scheduling import Schedule
from dspark_jax.verification import SparseDraft

V, T, PROMPT, SAMPLES = 10, 3, (3,), 200_000
REPEATED = (7, 2, 9, 4, 0, 5, 8, 1, 6, 3)  # whatever comes next has been said before
EXECUTIONS = {"sparse": dict(execution="lattice", candidates=6), "dense": dict(execution="sequential"),
              "union": dict(execution="lattice", candidates=3), "copying": dict(execution="lattice", candidates=4),
              "dense copying": dict(execution="sequential")}
RULES = ("token", "block")


@functools.cache
def target():
    """Mostly a table of bigrams, with an influence of the whole context."""
    return pairs.random_target(seed=4, vocab_size=V, hidden_size=8, layers=1, heads=1, kv_heads=1, depth=0.4,
                               tie_word_embeddings=False, head_spread=0.25, max_position_embeddings=16)


@functools.cache
def drafter(confidence=False, copy_length=0):
    """Knows the bigrams, and a little noise: its drafts are now good, now bad. Its confidences are arbitrary, and so are the
    tokens that it copies."""
    made = pairs.random_drafter(target(), transition="vanilla", rank=8, output_multiplier=0.6, block_length=T, heads=1,
                                kv_heads=1, target_layer_ids=(-1, 0), confidence=confidence, copy_length=copy_length)
    e = np.asarray(target().embedding())
    made.params["transition"] = {
        "predecessor": jnp.asarray(e / np.sqrt(np.mean(e**2, axis=-1, keepdims=True))), "successor": made.head_rows}
    return made


@functools.cache
def continuations(prompt=PROMPT):
    """Target logits after the prompt, after each first token and after each two: [V], [V, V], [V, V, V], float64."""
    texts = [[*prompt, a, b] for a in range(V) for b in range(V)]
    logits = np.asarray(target().logits(np.array(texts)), np.float64)[:, len(prompt) - 1:].reshape(V, V, 3, V)
    return logits[0, 0, 0], logits[:, 0, 1], logits[:, :, 2]


def law(logits, temperature, top_p):
    """Token probabilities, one row at a time."""
    out = np.zeros(logits.shape)
    for index in np.ndindex(logits.shape[:-1]):
        z = logits[index] / temperature
        p = np.exp(z - z.max())
        p /= p.sum()
        before = 0.0
        for token in np.argsort(-p, kind="stable"):
            if before < top_p:
                out[index][token] = p[token]
            before += p[token]
        out[index] /= out[index].sum()
    return out


def exact_law(temperature, top_p, prompt=PROMPT):
    """Joint law of the first three tokens, [V, V, V]."""
    first, second, third = (law(logits, temperature, top_p) for logits in continuations(prompt))
    return first[:, None, None] * second[:, :, None] * third


@functools.cache
def sample(q, rule, temperature, top_p, samples=SAMPLES, schedule=None, prompt=PROMPT):
    """Counts [V, V, V] of the first three tokens, and the accepted length."""
    draft = drafter(schedule is not None, 2 if "copying" in q else 0)
    draft = with_successors(draft, 4) if q == "union" else draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "PROMPT_BUCKET", 1)  # as little padding as possible: the batch is large
        patch.setattr(generation, "CACHE_BUCKET", 1)
        result = ds.generate(target(), draft, [prompt] * samples, max_new_tokens=3, temperature=temperature,
                             top_p=top_p, stop_tokens=[], verification=rule, schedule=schedule, **EXECUTIONS[q])
    if schedule is not None:
        assert len(set(map(tuple, result.proposed))) > (schedule.mode != "static")  # rows were treated differently
    counts = np.zeros((V,) * 3, np.int64)
    np.add.at(counts, tuple(np.array(result.tokens).T), 1)
    return counts, result.accepted_length


def chi_square(counts, law):
    """p-value of counts under a law of the same shape; cells in which fewer than 10 are expected count as one."""
    counts, expected = counts.ravel(), law.ravel() * (counts.sum() / law.sum())
    assert not counts[expected == 0].any(), "a token that the target never says"
    rare = expected < 10
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    if expected[-1] < 1:  # too rare even together
        counts, expected = counts[:-1], expected[:-1] * (counts[:-1].sum() / expected[:-1].sum())
    return scipy.stats.chisquare(counts, expected).pvalue


CASES = [*itertools.product(("sparse", "dense"), RULES, (0.5, 1.0, 1.5), (1.0, 0.8)), ("union", "block", 1.0, 0.8)]


@pytest.mark.parametrize("q, rule, temperature, top_p", CASES)
def test_law(q, rule, temperature, top_p):
    expected = exact_law(temperature, top_p)
    np.testing.assert_allclose(expected.sum(), 1)
    counts, length = sample(q, rule, temperature, top_p)
    assert counts.sum() == SAMPLES
    assert np.sum(expected * SAMPLES >= 10) >= 20  # cells enough to see something
    assert 1.2 < length < T + 0.7  # of at most T + 1: accepted and rejected, both often
    assert chi_square(counts, expected) > 0.001


@pytest.mark.parametrize("q, rule", [("copying", "token"), ("dense copying", "block")])
def test_law_of_a_drafter_that_copies(q, rule):
    """Most first drafts are copied, which is often wrong: the target does not repeat itself."""
    counts, length = sample(q, rule, 1.0, 1.0, prompt=REPEATED)
    _, without = sample(q.replace("dense copying", "dense").replace("copying", "sparse"), rule, 1.0, 1.0, prompt=REPEATED)
    assert abs(length - without) > 0.02  # it matters
    assert chi_square(counts, exact_law(1.0, 1.0, REPEATED)) > 0.001


@pytest.mark.parametrize("q, rule", [("sparse", "token"), ("dense", "block")])
def test_a_wrong_q_is_seen(monkeypatch, q, rule):
    """The same test fails where q is made of the scores before the temperature divided them."""
    temperature, right = 1.5, verification.get_verification(rule)

    def undivided(probabilities):
        p = probabilities**temperature  # softmax(s / temperature) -> softmax(s)
        return p / p.sum(-1, keepdims=True)

    def wrong(key, p, tokens, q, proposed=None):
        q = SparseDraft(q.ids, undivided(q.probabilities)) if isinstance(q, SparseDraft) else undivided(q)
        return right(key, p, tokens, q, proposed)

    monkeypatch.setitem(verification.VERIFICATION, f"wrong {rule}", wrong)
    counts, _ = sample(q, f"wrong {rule}", temperature, 1.0)
    assert chi_square(counts, exact_law(temperature, 1.0)) < 1e-6


@pytest.mark.parametrize("q", ["sparse", "dense"])
def test_the_block_rule_keeps_more(q):
    for temperature in (0.5, 1.0, 1.5):
        token, block = (sample(q, rule, temperature, 1.0)[1] for rule in RULES)
        assert block > token - 0.01  # three standard errors
        if temperature == 1:
            assert block > token


SPEED = 1 / (1 + np.arange(SAMPLES * (T + 1) + 1) / SAMPLES)
SCHEDULES = [Schedule("causal", steps_per_second=SPEED), Schedule("lagged", steps_per_second=SPEED),
             Schedule("static", length=1), Schedule("threshold", threshold=0.5)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.mode)
def test_law_where_a_schedule_decides(schedule):
    """Whatever decides how many drafts are verified, and on as few tokens as that takes."""
    counts, _ = sample("sparse", "token", 1.0, 1.0, schedule=schedule)
    assert counts.sum() == SAMPLES
    assert chi_square(counts, exact_law(1.0, 1.0)) > 0.001
