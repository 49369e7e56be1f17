import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dspark_jax import losses
from golden import GOLDENS, close, load

Z = load("dspark/loss")
CASES = list(Z["case_names"])


def case(name):
    z = {k.removeprefix(f"{name}."): v for k, v in Z.items() if k.startswith(f"{name}.")}
    ce, l1, confidence = map(float, z["weights"])
    options = dict(ce=ce, l1=l1, confidence=confidence, decay=float(z["gamma"]))
    return z, options


def arguments(z):
    inputs = ("draft_logits", "aligned_target_logits", "target_ids", "eval_mask", "confidence_pred")
    return [z.get(k) for k in inputs]


@pytest.mark.parametrize("name", CASES)
def test_golden_loss_and_metrics(name):
    z, options = case(name)
    loss, metrics = jax.jit(lambda *x: losses.drafter_loss(*x, **options))(*arguments(z))
    close(loss, z["total_loss"])
    close(loss, z["metric.loss"])
    names = {term: f"{term}_loss" for term in ("ce", "l1", "confidence")}
    names["expected_accepted_length"] = "tau_probabilistic"
    seen = {"metric.loss"}
    for ours, value in metrics.items():
        theirs = f"metric.{names.get(ours, ours)}"
        if ours == "accept_rate":
            for t, rate in enumerate(value):
                close(rate, z[f"{theirs}@{t}"])
                seen.add(f"{theirs}@{t}")
        elif theirs in z:
            close(value, z[theirs], message=theirs)
            seen.add(theirs)
    assert seen == {k for k in z if k.startswith("metric.")}


@pytest.mark.parametrize("name", CASES)
def test_golden_terms(name):
    z, options = case(name)
    terms = jax.jit(lambda *x: losses.drafter_terms(*x, options["decay"]))(*arguments(z))
    close(losses.position_weights(z["eval_mask"], options["decay"]), z["loss_weight_mask"])
    for term in ("ce", "l1", "confidence"):
        if options[term] == 0 and term == "l1":
            continue  # the reference does not compute a term of weight 0; here it is a metric all the same
        close(terms[term].numerator, z[f"{term}_loss_num"], message=term)
        close(terms[term].denominator, z[f"{term}_loss_den"], message=term)
    if "aligned_target_logits" in z:
        rate = losses.accept_rate(losses.l1_distance(z["draft_logits"], z["aligned_target_logits"]))
        close(rate, z["accept_rate_3d"])


@pytest.mark.parametrize("name", CASES)
def test_golden_gradients(name):
    z, options = case(name)
    d, y, labels, mask, c = arguments(z)
    f = lambda d, c: losses.drafter_loss(d, y, labels, mask, c, **options)[0]
    if name != "identical":  # there the reference's gradient hangs on two softmaxes being equal to the last bit
        close(jax.jit(jax.grad(f, 0))(d, c), z["grad_draft_logits"])
    if c is not None:
        close(jax.jit(jax.grad(f, 1))(d, c), z["grad_confidence_pred"])


def test_sums_over_chunks_are_the_whole():
    """What chunked and multi-device training rely on: terms add up, and are divided once."""
    z, options = case("full")
    decay = options.pop("decay")
    split = [[x[:1], x[1:]] for x in arguments(z)]
    terms = jax.jit(lambda *x: losses.drafter_terms(*x, decay))
    first, second = (terms(*(s[i] for s in split)) for i in (0, 1))
    loss, metrics = losses.combine_terms(jax.tree.map(jnp.add, first, second), **options)
    whole, expected = losses.drafter_loss(*arguments(z), **options, decay=decay)
    close(loss, whole)
    jax.tree.map(close, metrics, expected)


def test_against_loops():
    rng = np.random.default_rng(0)
    N, T, V = 3, 4, 9
    d, y = rng.normal(size=(2, N, T, V)).astype(np.float32) * 2
    c = rng.normal(size=(N, T)).astype(np.float32)
    labels = rng.integers(0, V, (N, T))
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    sums = dict.fromkeys(("ce", "l1", "confidence", "weight"), 0.0)
    rates, lengths = [[] for _ in range(T)], []
    for n in range(N):
        alive, length = 1.0, 1.0
        for t in range(T):
            if not mask[n, t]:
                break
            p, q = (np.exp(x[n, t].astype(np.float64)) / np.exp(x[n, t].astype(np.float64)).sum() for x in (d, y))
            alpha, s, w = np.minimum(p, q).sum(), 1 / (1 + np.exp(-np.float64(c[n, t]))), np.exp(-t / 2.5)
            sums["ce"] -= w * np.log(p[labels[n, t]])
            sums["l1"] += w * np.abs(p - q).sum()
            sums["confidence"] -= w * (alpha * np.log(s) + (1 - alpha) * np.log(1 - s))
            sums["weight"] += w
            rates[t].append(alpha)
            alive *= alpha
            length += alive
        if mask[n].any():
            lengths.append(length)
    options = dict(ce=0.3, l1=0.5, confidence=0.7, decay=2.5)
    loss, metrics = jax.jit(lambda *x: losses.drafter_loss(*x, **options))(d, y, labels, mask, c)
    close(loss, (0.3 * sums["ce"] + 0.5 * sums["l1"] + 0.7 * sums["confidence"]) / (sums["weight"] + 1e-6))
    for name in ("ce", "l1", "confidence"):
        close(metrics[name], sums[name] / sums["weight"])
    close(metrics["accept_rate"], [np.mean(r) if r else 0 for r in rates])
    close(metrics["expected_accepted_length"], np.mean(lengths))


def test_known_numbers():
    p, q = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    close(losses.accept_rate(losses.l1_distance(p, q)), 0.7)
    close(losses.expected_accepted_length(jnp.array([0.9, 0.8, 0.5]), jnp.ones(3, bool)), 2.98)
    close(losses.position_weights(np.ones(7, bool), 4.0).sum(), 3.735212)
    for decay in (None, 0, -1.0):
        np.testing.assert_array_equal(losses.position_weights(np.array([True, False]), decay), [1, 0])
    assert losses.accept_rate(jnp.float32(2.0000002)) == 0 and losses.accept_rate(jnp.float32(-1e-7)) == 1


def test_large_and_masked_logits_stay_finite():
    """Logits of 1e4, -inf on tokens outside a draft vocabulary, infinite loss where nothing is supervised."""
    d = jnp.array([[1e4, -1e4, 0.0], [-jnp.inf, 2.0, 1.0]])
    y = jnp.array([[-1e4, 1e4, 0.0], [1.0, 2.0, 3.0]])
    labels, mask = jnp.array([0, 0]), jnp.array([True, False])  # the label of the second draft has the logit -inf
    c = jnp.array([500.0, -500.0])
    f = lambda d, c: losses.drafter_loss(d, y, labels, mask, c)[0]
    value, grads = jax.jit(jax.value_and_grad(f, (0, 1)))(d, c)
    close(value, 0.9 * 2 + 500)
    assert all(np.isfinite(g).all() for g in grads)


def test_labels_of_the_confidence_are_constants():
    z, _ = case("full")
    d, y, labels, mask, c = arguments(z)
    g = jax.jit(jax.grad(lambda d: losses.drafter_loss(d, y, labels, mask, c, ce=0.0, l1=0.0)[0]))(d)
    np.testing.assert_array_equal(g, 0)
    alpha = jnp.full(c.shape, 0.3)
    np.testing.assert_array_equal(jax.grad(lambda alpha: losses.confidence_bce(c, alpha).sum())(alpha), 0)


def test_terms_of_weight_zero_cost_no_backward_pass():
    z, _ = case("full")
    d, y, labels, mask, c = arguments(z)
    f = lambda l1: lambda d: losses.drafter_loss(d, y, labels, mask, c, ce=1.0, l1=l1, confidence=0.0)[0]
    flops = lambda l1: jax.jit(jax.grad(f(l1))).lower(d).compile().cost_analysis()["flops"]
    assert flops(0.0) < 0.75 * flops(1.0)


def test_gradient_keeps_the_dtype_of_the_logits():
    z, options = case("full")
    d, *rest = arguments(z)
    g = jax.grad(lambda d: losses.drafter_loss(d, *rest, **options)[0])(jnp.asarray(d, jnp.bfloat16))
    assert g.dtype == jnp.bfloat16
    close(g.astype(np.float32), z["grad_draft_logits"], tolerance=2e-2)


def smooth(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def test_gradients_to_second_order():
    """All losses at once, each of its own differentiable inputs; alpha is fixed, for the loss holds it constant."""
    with jax.enable_x64(True):
        d, y, c, s, own = smooth(0, 2, 3, 5), smooth(1, 2, 3, 5), smooth(2, 2, 3), smooth(3, 2, 3, 2), smooth(4, 2, 3)
        labels, mask = jnp.array([[0, 1, 2], [3, 4, 0]]), jnp.array([[True, True, True], [True, True, False]])
        candidates = jnp.array([[[0, 1], [1, 0], [3, 4]], [[3, 0], [4, 1], [1, 2]]])
        weights = losses.position_weights(mask, 4.0)
        alpha = losses.accept_rate(losses.l1_distance(d, y))

        def f(z, y_, c, s, own):
            return {
                "ce": losses.cross_entropy(z, labels),
                "l1": losses.l1_distance(z, y_),
                "confidence": losses.confidence_bce(c, alpha),
                "drafter, but confidence": losses.drafter_loss(z, y_, labels, mask, c, confidence=0.0)[0],
                "drafter": losses.drafter_loss(d, y, labels, mask, c)[0],
                "exclude": losses.candidate_cross_entropy(s, candidates, labels, weights, "exclude").loss(),
                "inject": losses.candidate_cross_entropy(s, candidates, labels, weights, "inject", own).loss(),
            }

        check_grads(jax.jit(f), (d, y, c, s, own), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("decay", ["uniform", "gamma4"])
def test_golden_candidate_cross_entropy(decay):
    z = load("dflash/expected/draft_v2_train")
    expected = json.loads((GOLDENS / "dflash/expected/draft_v2_train.json").read_text())
    mask = z["label_mask"] > 0.5
    weights = losses.position_weights(mask, {"uniform": None, "gamma4": 4.0}[decay])
    close(weights, z[f"weights_{decay}"])
    block = losses.weighted(weights, losses.cross_entropy(z["logits"], z["labels"]))
    close(block.loss(), expected[f"block_ce_{decay}"])

    scores, candidates, labels = z["selector_scores"], z["candidates"], z["labels"]
    exclude = losses.candidate_cross_entropy(scores, candidates, labels, weights, "exclude")
    close(exclude.loss(), expected[f"selector_ce_excluded_{decay}"])
    shared = losses.Ratio(exclude.numerator, weights.sum())
    close(shared.loss(), expected[f"selector_ce_excluded_shared_denominator_{decay}"])

    # An injected label's own score is in the last slot of the reference's injected scores.
    own = z["injected_scores"][..., -1]
    inject = losses.candidate_cross_entropy(scores, candidates, labels, weights, "inject", own)
    close(inject.loss(), expected[f"selector_ce_injected_{decay}"])


def test_golden_candidate_terms():
    z = load("dflash/expected/draft_v2_train")
    close(losses.cross_entropy(z["logits"], z["labels"]), z["token_nll"])
    found, index = losses.locate_label(z["candidates"], z["labels"])
    np.testing.assert_array_equal(found, z["label_in_topk"])
    np.testing.assert_array_equal(index[found], z["label_index"][found])
    nll = losses.cross_entropy(z["selector_scores"], index)
    close(nll[found], z["selector_token_nll"][found])

    own = z["injected_scores"][..., -1]
    scores, candidates = losses.inject_label(z["selector_scores"], z["candidates"], z["labels"], own)
    np.testing.assert_array_equal(candidates, z["injected_candidates"])
    np.testing.assert_array_equal(scores, z["injected_scores"])
    found, index = losses.locate_label(candidates, z["labels"])
    assert found.all()
    np.testing.assert_array_equal(index, z["injected_label_index"])
    close(losses.cross_entropy(scores, index), z["injected_token_nll"])


def test_candidate_cross_entropy_says_what_it_misses():
    x = np.zeros((1, 2)), np.zeros((1, 2), int), np.zeros(1, int), np.ones(1)
    with pytest.raises(ValueError, match="policy: unknown name 'drop'; allowed: exclude, inject"):
        losses.candidate_cross_entropy(*x, "drop")
    with pytest.raises(ValueError, match="label_scores: None"):
        losses.candidate_cross_entropy(*x, "inject")
