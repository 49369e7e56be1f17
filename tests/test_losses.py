import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dspark_jax import losses
from dspark_jax.divergences import accept_rate, cross_entropy, kl_divergence, l1_distance
from dspark_jax.loss_weights import LossWeights, draft_weights, loss_denominators
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
        rate = accept_rate(l1_distance(z["draft_logits"], z["aligned_target_logits"]))
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
    both = jax.tree.map(jnp.add, first, second)
    whole, expected = losses.drafter_loss(*arguments(z), **options, decay=decay)
    close(losses.weighted_sum(both, options), whole)
    jax.tree.map(close, losses.metrics_of(both), expected)
    # With the denominators of all of it, which the mask tells, the losses of the parts add up by themselves.
    totals = loss_denominators(LossWeights(decay=decay), z["eval_mask"], z["eval_mask"])
    close(sum(losses.weighted_sum(part, options, totals) for part in (first, second)), whole)


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
    close(accept_rate(l1_distance(p, q)), 0.7)
    close(losses.expected_accepted_length(jnp.array([0.9, 0.8, 0.5]), jnp.ones(3, bool)), 2.98)
    close(losses.position_weights(np.ones(7, bool), 4.0).sum(), 3.735212)
    close(kl_divergence(p, q), 0.2 * np.log(0.2 / 0.5) + 0.5 * np.log(0.5 / 0.3) + 0.3 * np.log(0.3 / 0.2))
    for decay in (None, 0, -1.0):
        np.testing.assert_array_equal(losses.position_weights(np.array([True, False]), decay), [1, 0])
    assert accept_rate(jnp.float32(2.0000002)) == 0 and accept_rate(jnp.float32(-1e-7)) == 1


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
        alpha = accept_rate(l1_distance(d, y))

        def f(z, y_, c, s, own, n):
            return {
                "ce": cross_entropy(z, labels),
                "l1": l1_distance(z, y_),
                "confidence": losses.confidence_bce(c, alpha),
                "l1 over more tokens": l1_distance(z, y_, jax.nn.logsumexp(y_, axis=-1) + n),
                "kl": kl_divergence(z, y_),
                "length": losses.expected_accepted_length(accept_rate(l1_distance(z, y_)), mask),
                "drafter, but confidence": losses.drafter_loss(z, y_, labels, mask, c, confidence=0.0)[0],
                "drafter": losses.drafter_loss(d, y, labels, mask, c)[0],
                "exclude": losses.candidate_cross_entropy(s, candidates, labels, weights, "exclude").loss(),
                "inject": losses.candidate_cross_entropy(s, candidates, labels, weights, "inject", own).loss(),
            }

        check_grads(jax.jit(f), (d, y, c, s, own, jnp.exp(own)), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("decay", ["uniform", "gamma4"])
def test_golden_candidate_cross_entropy(decay):
    z = load("dflash/expected/draft_v2_train")
    expected = json.loads((GOLDENS / "dflash/expected/draft_v2_train.json").read_text())
    mask = z["label_mask"] > 0.5
    weights = losses.position_weights(mask, {"uniform": None, "gamma4": 4.0}[decay])
    close(weights, z[f"weights_{decay}"])
    block = losses.weighted(weights, cross_entropy(z["logits"], z["labels"]))
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
    close(cross_entropy(z["logits"], z["labels"]), z["token_nll"])
    found, index = losses.locate_label(z["candidates"], z["labels"])
    np.testing.assert_array_equal(found, z["label_in_topk"])
    np.testing.assert_array_equal(index[found], z["label_index"][found])
    nll = cross_entropy(z["selector_scores"], index)
    close(nll[found], z["selector_token_nll"][found])

    own = z["injected_scores"][..., -1]
    scores, candidates = losses.inject_label(z["selector_scores"], z["candidates"], z["labels"], own)
    np.testing.assert_array_equal(candidates, z["injected_candidates"])
    np.testing.assert_array_equal(scores, z["injected_scores"])
    found, index = losses.locate_label(candidates, z["labels"])
    assert found.all()
    np.testing.assert_array_equal(index, z["injected_label_index"])
    close(cross_entropy(scores, index), z["injected_token_nll"])


def test_candidate_cross_entropy_says_what_it_misses():
    x = np.zeros((1, 2)), np.zeros((1, 2), int), np.zeros(1, int), np.ones(1)
    with pytest.raises(ValueError, match="policy: unknown name 'drop'; allowed: exclude, inject"):
        losses.candidate_cross_entropy(*x, "drop")
    with pytest.raises(ValueError, match="label_scores: None"):
        losses.candidate_cross_entropy(*x, "inject")


# ------------------------------------------------------------------------------------------- terms beyond the reference


def law(x):
    e = np.exp(np.float64(x) - np.max(x))
    return e / e.sum()


def test_kl_against_loops():
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(2, 5, 7)).astype(np.float32) * 3
    expected = [sum(q * np.log(q / p) for p, q in zip(law(a), law(b))) for a, b in zip(z, y)]
    close(kl_divergence(z, y), expected)
    np.testing.assert_array_less(-1e-6, kl_divergence(z, z + 2.0))
    # Tokens that neither law can give, and one that only the draft law can.
    z, y = jnp.array([1.0, -jnp.inf, 0.5, 0.2]), jnp.array([0.3, -jnp.inf, 0.1, -jnp.inf])
    value, gradient = jax.value_and_grad(kl_divergence)(z, y)
    keep = [0, 2]
    q = law(np.asarray(y)[keep])
    close(value, sum(q * np.log(q / law(np.asarray(z)[[0, 2, 3]])[:2])))
    assert np.isfinite(gradient).all()


def test_accept_rate_of_a_reduced_vocabulary():
    """What the target gives the tokens that cannot be drafted is lost, and nothing else is."""
    rng = np.random.default_rng(1)
    V, ids = 11, np.array([0, 2, 3, 7, 9])
    z, y = rng.normal(size=(6, len(ids))).astype(np.float32), rng.normal(size=(6, V)).astype(np.float32) * 2
    normalizer = jax.nn.logsumexp(y, axis=-1)
    l1 = l1_distance(z, y[:, ids], normalizer)
    everywhere = np.full((6, V), -np.inf, np.float32)
    everywhere[:, ids] = z
    close(l1, l1_distance(everywhere, y))
    close(accept_rate(l1), [np.minimum(law(a), law(b)[ids]).sum() for a, b in zip(z, y)])
    assert (accept_rate(l1) < accept_rate(l1_distance(z, y[:, ids]))).all()
    of = lambda f: jax.grad(lambda z: f(z).sum())(jnp.asarray(z))
    scatter = lambda z: jnp.full((6, V), -jnp.inf).at[:, ids].set(z)
    close(of(lambda z: l1_distance(z, y[:, ids], normalizer)), of(lambda z: l1_distance(scatter(z), y)))


def test_accept_rate_reaches_terms():
    rng = np.random.default_rng(2)
    z, y = rng.normal(size=(2, 2, 3, 5)).astype(np.float32)
    mask, labels, c = np.ones((2, 3), bool), np.zeros((2, 3), int), np.zeros((2, 3), np.float32)
    n = jax.nn.logsumexp(y, axis=-1) + 0.3
    terms = losses.drafter_terms(z, y, labels, mask, c, None, log_normalizer=n)
    alpha = accept_rate(l1_distance(z, y, n))
    close(terms["accept_rate"].metric(), alpha.mean(0))
    close(terms["expected_accepted_length"].metric(), losses.expected_accepted_length(alpha, mask).mean())
    close(terms["confidence"].metric(), np.log(2))
    close(terms["confidence_bias"].metric(), (0.5 - alpha).mean())


def test_expected_length_is_a_loss():
    """Its gradient by one logit, by differences in float64; nothing behind the first unsupervised draft counts."""
    with jax.enable_x64(True):
        z, y = smooth(5, 1, 4, 6), smooth(6, 1, 4, 6)
        mask = jnp.array([[True, True, True, False]])

        def loss(z):
            terms = losses.drafter_terms(z, y, jnp.zeros((1, 4), int), mask, None)
            return losses.weighted_sum(terms, {"expected_accepted_length": -1.0})

        slow = lambda z: 1 + sum(np.prod([np.minimum(law(a), law(b)).sum() for a, b in zip(z[0, :j], y[0, :j])])
                                 for j in (1, 2, 3))
        close(loss(z), -slow(z))
        gradient = jax.grad(loss)(z)
        for t in range(4):
            step = np.zeros(z.shape)
            step[0, t, 2] = 1e-5
            close(gradient[0, t, 2], -(slow(z + step) - slow(z - step)) / 2e-5, tolerance=2e-5)
        assert gradient[0, 0, 2] != 0 and not gradient[0, 3].any()


def slow_adaptive(p, m, smoothing):
    T, w = len(p), np.zeros(len(p))
    for j in range(T):
        for k in range(j, T):
            w[j] += np.prod([((1 - smoothing) * p[i] + smoothing) * m[i] for i in range(k + 1)])
    return w * m


def test_adaptive_weights():
    p = np.array([[0.9, 0.5, 0.1, 0.7], [0.2, 1.0, 0.0, 0.3]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)  # the last draft is behind one that is not supervised
    for smoothing in (0.5, 0.2, 1.0):
        expected = [slow_adaptive(a, m, smoothing) for a, m in zip(p, mask)]
        close(losses.adaptive_weights(p, mask, smoothing), expected)
    close(losses.adaptive_weights(p, mask, 1.0)[0], [4, 3, 2, 1])
    assert not jax.grad(lambda p: losses.adaptive_weights(p, mask).sum())(p).any()


def test_adaptive_cross_entropy_climbs_the_accepted_length():
    """Without smoothing it has the gradient of -sum_k prod_{i<=k} p_i(l_i)."""
    rng = np.random.default_rng(3)
    z, labels = rng.normal(size=(3, 4, 6)).astype(np.float32), rng.integers(0, 6, (3, 4))
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    p = lambda z: jnp.exp(-cross_entropy(z, labels))
    w = losses.adaptive_weights(p(z), mask, 0.0)
    ours = jax.grad(lambda z: losses.weighted(w, cross_entropy(z, labels)).numerator)(z)
    close(ours, jax.grad(lambda z: -losses.expected_accepted_length(p(z), mask).sum())(z))


# --------------------------------------------------------------------------------------------------------- loss weights


def test_loss_weights():
    assert LossWeights().at(0) == {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
    w = LossWeights(ce=0, l1=0, confidence=0, unary=1, candidates=2.0, candidates_warmup=4, expected_length=0.5)
    assert w.at(0) == {"unary": 1, "candidates": 0, "expected_accepted_length": -0.5}
    assert [float(w.at(n)["candidates"]) for n in (1, 3, 4, 100)] == [0.5, 1.5, 2.0, 2.0]


def test_draft_weights_and_denominators():
    rng = np.random.default_rng(4)
    z, labels = rng.normal(size=(3, 4, 6)).astype(np.float32), rng.integers(0, 6, (3, 4))
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    reached = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
    decay, adaptive = LossWeights(decay=2.0), LossWeights(decay=2.0, position_weights="adaptive", smoothing=0.3)
    w = losses.position_weights(mask, 2.0)
    np.testing.assert_array_equal(draft_weights(decay, z, labels, mask), w)
    p = [[law(row)[l] for row, l in zip(block, ids)] for block, ids in zip(z, labels)]
    close(draft_weights(adaptive, z, labels, mask), losses.adaptive_weights(np.array(p), mask, 0.3))
    for options, shared in ((decay, w.sum()), (adaptive, 2)):
        found = loss_denominators(options, mask, reached)
        close(found["confidence"], losses.position_weights(reached, 2.0).sum())
        close(found["expected_accepted_length"], 3)
        assert all(found[name] == shared for name in ("ce", "l1", "kl", "unary", "candidates"))


@pytest.mark.parametrize("field, value, message", [
    ("ce", -0.1, "loss.ce: -0.1; must be a finite number, at least 0"),
    ("kl", float("nan"), "loss.kl: nan; must be a finite number, at least 0"),
    ("position_weights", "linear", "loss.position_weights: unknown name 'linear'; allowed: decay, adaptive"),
    ("missing_label", "drop", "loss.missing_label: unknown name 'drop'; allowed: exclude, inject"),
    ("smoothing", 0.0, "loss.smoothing: 0.0; must lie in (0, 1]"),
    ("candidates_warmup", -1, "loss.candidates_warmup: -1; must be at least 0"),
])
def test_bad_loss_weights(field, value, message):
    with pytest.raises(ValueError) as error:
        LossWeights(**{field: value})
    assert str(error.value) == message


def test_loss_of_nothing():
    with pytest.raises(ValueError, match="loss: every weight is 0; one of ce, l1"):
        LossWeights(ce=0.0, l1=0.0, confidence=0.0)
