"""The training loss: chunks, micro-steps, every term against the slow version of itself, and what is trained by it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from ml_collections import config_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pairs
import program
import slow
from dspark_jax import losses
from dspark_jax.loss_weights import LossWeights, loss_denominators
from golden import close
from train import benchmark_losses, block_evaluation, features, loop, objective

ALL = dict(ce=0.1, l1=0.9, confidence=0.5, unary=0.3, kl=0.2, candidates=0.7, expected_length=0.4)
IDS = np.arange(3, 48, 2)


@functools.cache
def setting(transition="vanilla", draft_ids=True, **fields):
    """A drafter, what is frozen, and a batch of 4 sequences of 30 tokens with the target's features."""
    target = pairs.random_target()
    ids = IDS if draft_ids else None
    fields |= {"transition": transition, "confidence": transition != "none"}
    drafter = pairs.random_drafter(target, draft_ids=ids, **fields)
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "target_to_draft": loop.inverse(ids, 48),
              "draft_to_target": drafter.draft_to_target, "target_head": target.head_rows() if draft_ids else None}
    rng = np.random.default_rng(0)
    tokens = rng.choice(IDS, (4, 30)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.05] = 4  # a few that cannot be drafted
    mask = np.ones((4, 30), np.float32)
    mask[0, 20:], mask[1, :25], mask[2] = 0, 0, 0
    rows = features.rows_of(target.config, target.params, jnp.asarray(tokens), drafter.config.target_layer_ids)
    return drafter, frozen, {"tokens": jnp.asarray(tokens), "loss_mask": jnp.asarray(mask), "features": rows}


def parts(drafter, frozen, batch, anchors=7):
    blocks = objective.sample_blocks(drafter.config, batch, frozen["target_to_draft"], jax.random.key(3), anchors)
    assert 10 < blocks["mask"].sum() < blocks["mask"].size - 10
    return blocks


def loss_and_gradient(weights, size, drafter, frozen, batch, blocks):
    denominators = loss_denominators(weights, blocks["mask"], blocks["reached"])
    f = lambda params: objective.batch_loss(
        drafter.config, weights, params, frozen, batch, blocks, weights.at(0), denominators, size)
    return jax.jit(jax.value_and_grad(f, has_aux=True))(drafter.params)


def same(a, b, tolerance=1e-6):
    jax.tree.map(lambda a, b: close(a, b, tolerance), a, b)


# ---------------------------------------------------------------------------------------------- chunks and micro-steps


@pytest.mark.parametrize("transition, fields", [
    ("context", {}), ("none", {}), ("vanilla", {"confidence_with_law": True, "execution": "lattice", "candidates": 3}),
    ("vanilla", {"confidence_with_law": True, "execution": "lattice", "candidates": 3, "copy_length": 3})])
def test_chunks_equal_the_whole(transition, fields):
    """Loss, terms and gradients of every parameter, with all terms at once; 7 anchors in chunks of 3 leave 2 over."""
    drafter, frozen, batch = setting(transition, **fields)
    weights = LossWeights(**ALL | ({"confidence": 0.0} if transition == "none" else {}))
    blocks = parts(drafter, frozen, batch)
    (loss, terms), gradient = loss_and_gradient(weights, 3, drafter, frozen, batch, blocks)
    denominators = loss_denominators(weights, blocks["mask"], blocks["reached"])

    def whole(params):  # differentiated by jax, all logits at once
        shared, rows, fixed, fixed_rows = objective.head_inputs(drafter.config, weights, params, frozen, batch, blocks)
        fixed |= {"weights": weights.at(0), "denominators": denominators}
        return objective.chunk_loss(drafter.config, weights, shared, rows, fixed, fixed_rows)

    (expected_loss, expected_terms), expected = jax.jit(jax.value_and_grad(whole, has_aux=True))(drafter.params)
    assert np.isfinite(loss) and all(np.abs(g).max() > 0 for g in jax.tree.leaves(expected))
    same(loss, expected_loss)
    same(terms, expected_terms)
    same(gradient, expected, 2e-6)


@pytest.mark.parametrize("position_weights", ["decay", "adaptive"])
def test_micro_steps_equal_the_large_batch(position_weights):
    """Gradients, as the momentum of a first step, and metrics; one of 4 micro-steps has nothing to learn from."""
    drafter, frozen, batch = setting()
    weights, optimizer = LossWeights(**ALL, position_weights=position_weights), optax.sgd(1.0, momentum=0.9)
    results = []
    for micro_steps, size in ((1, 7), (4, None)):
        step = objective.make_step(drafter.config, weights, optimizer, anchors=7, anchors_per_chunk=size,
                                   micro_steps=micro_steps)
        state = optimizer.init(drafter.params)
        results.append(jax.jit(step)(drafter.params, state, frozen, batch, jax.random.key(3), 0))
    (_, whole, expected), (_, state, metrics) = results
    same(state[0].trace, whole[0].trace, 2e-6)
    same(metrics, expected, 2e-6)


def test_sharded_batch_and_vocabulary():
    """Sequences over four devices, the vocabulary over two: the loss and gradients of one, and no logits travel."""
    drafter, frozen, batch = setting(draft_ids=False)
    blocks, weights = parts(drafter, frozen, batch), LossWeights(**ALL | {"candidates": 0.0})
    expected = loss_and_gradient(weights, 3, drafter, frozen, batch, blocks)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    frozen = frozen | {"head_rows": place(frozen["head_rows"], "tensor")}
    params = place(drafter.params) | {"transition": place(drafter.params["transition"], "tensor")}
    batch, blocks = place(batch, "data"), place(blocks, "data")

    def f(params, frozen, batch, blocks):
        return objective.batch_loss(drafter.config, weights, params, frozen, batch, blocks, weights.at(0),
                                    loss_denominators(weights, blocks["mask"], blocks["reached"]), 3)

    program = jax.jit(jax.value_and_grad(f, has_aux=True)).lower(params, frozen, batch, blocks).compile()
    same(program(params, frozen, batch, blocks), expected, 2e-6)
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather", program.as_text())
    assert not [shape for shape in gathered if shape.endswith(",48")], gathered


def test_batch_without_a_supervised_draft():
    drafter, frozen, batch = setting()
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    step = jax.jit(objective.make_step(drafter.config, LossWeights(**ALL), optimizer, anchors=7))
    state = optimizer.init(drafter.params)
    nothing = batch | {"loss_mask": jnp.zeros_like(batch["loss_mask"])}
    params, after, metrics = step(drafter.params, state, frozen, nothing, jax.random.key(0), 5)
    jax.tree.map(np.testing.assert_array_equal, (params, after), (drafter.params, state))
    assert metrics["blocks"] == 0 and metrics["loss"] == 0
    assert all(np.isfinite(m).all() for m in jax.tree.leaves(metrics))
    *_, metrics = step(drafter.params, state, frozen, batch, jax.random.key(3), 5)
    assert metrics["blocks"] == parts(drafter, frozen, batch)["reached"].any(-1).sum() > 0


# ------------------------------------------------------------------------------------------------------ terms, slowly


def softmax(x):
    e = np.exp(np.float64(x) - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def arrays(drafter, frozen, batch, blocks):
    """What the heads give, as NumPy arrays: base logits, logits, hidden states, and the target's full law."""
    inputs = objective.head_inputs(drafter.config, LossWeights(), drafter.params, frozen, batch, blocks)
    base, logits, _, _ = objective.laws(drafter.config, *inputs)
    head = frozen["head_rows"] if frozen["target_head"] is None else frozen["target_head"]
    law = softmax(np.asarray(inputs[3]["final"]) @ np.asarray(head).T)
    return *map(np.asarray, (base, logits, inputs[1]["hidden"])), law


def supervised(mask):
    return [tuple(i) for i in np.argwhere(np.asarray(mask))]


def slow_reached(batch, blocks):
    """bool [B, N, T]: drafts that verification can come to, token by token."""
    tokens, supervised = np.asarray(batch["tokens"]), np.asarray(batch["loss_mask"])
    reached = np.zeros(blocks["mask"].shape, bool)
    for b, n, t in np.ndindex(reached.shape):
        places = int(blocks["anchors"][b, n]) + 1 + np.arange(t + 1)
        reached[b, n, t] = (blocks["keep"][b, n] and places[-1] < tokens.shape[1] and supervised[b, places].all()
                            and np.isin(tokens[b, places[:-1]], IDS).all())
    return reached


def optimizer_options(**fields):
    return config_dict.ConfigDict({"kind": "adamw", "lr": 1e-2, "warmup_steps": 0, "decay_steps": None, "b1": 0.9, "b2": 0.99,
                                   "weight_decay": 0.0, "clip": 1.0} | fields)


@pytest.mark.parametrize("trained", [objective.PARTS, ("backbone",)])
def test_muon(trained):
    """Of a matrix of the backbone all but the smallest singular directions are moved by (nearly) the same amount, of the right
    size; everything else as AdamW would."""
    drafter, frozen, batch = setting(conv_kernel_size=2)
    _, gradient = loss_and_gradient(LossWeights(), 7, drafter, frozen, batch, parts(drafter, frozen, batch))
    optimizer = objective.make_optimizer(optimizer_options(kind="muon"), 1000, trained)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(drafter.params), drafter.params)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b1=0.9, b2=0.99, weight_decay=0.0, nesterov=True))
    clipped = {name: part for name, part in gradient.items() if name in trained}  # the norm is that of what is trained
    expected, _ = adam.update(clipped, adam.init(clipped), clipped)
    matrices = 0
    for path, update in traverse_util.flatten_dict(updates).items():
        if path[0] not in trained:
            assert not update.any()
        elif path[0] == "backbone" and path[-1] == "weight" and update.ndim == 2:
            matrices += 1
            u, s, v = np.linalg.svd(traverse_util.flatten_dict(gradient)[path], full_matrices=False)
            turned = -u.T @ np.asarray(update) @ v.T / (1e-2 * 0.2 * max(update.shape) ** 0.5)
            assert 0.6 < turned.diagonal()[s > 0.1 * s[0]].min() and turned.diagonal().max() < 1.3, path
            assert np.abs(turned - np.diag(turned.diagonal())).max() < 0.02, path
        else:
            same(update, traverse_util.flatten_dict(expected)[path])
    assert matrices == 8


def test_an_unknown_optimizer():
    with pytest.raises(ValueError, match="optimizer.kind: 'sgd'; allowed: 'adamw', 'muon'"):
        objective.make_optimizer(optimizer_options(kind="sgd"), 10)


def test_only_some_parts_are_trained():
    """The others keep their values, whatever the loss and the decay of weights would do to them."""
    drafter, frozen, batch = setting()
    options = optimizer_options(weight_decay=0.1)
    for trained in (("confidence",), ("backbone", "transition")):
        optimizer = objective.make_optimizer(options, 10, trained)
        step = jax.jit(objective.make_step(drafter.config, LossWeights(**ALL), optimizer, anchors=7, trained=trained))
        params, _, metrics = step(drafter.params, optimizer.init(drafter.params), frozen, batch, jax.random.key(3), 0)
        for name, part in params.items():
            changed = [np.any(a != b) for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(drafter.params[name]))]
            assert all(changed) if name in trained else not any(changed), name
        blocks = parts(drafter, frozen, batch)
        _, gradient = loss_and_gradient(LossWeights(**ALL), 7, drafter, frozen, batch, blocks)
        close(metrics["gradient_norm"], optax.tree.norm({name: gradient[name] for name in trained}), 1e-5)


def test_accept_rates_are_those_of_verification():
    """With a reduced draft vocabulary too: alpha = sum over the draft vocabulary of min(p, q), q over all tokens."""
    drafter, frozen, batch = setting()
    first = parts(drafter, frozen, batch)["anchors"][:2, 2] + 1
    batch = batch | {"tokens": batch["tokens"].at[jnp.arange(2), first].set(4)}  # no draft can be this label
    blocks = parts(drafter, frozen, batch)
    (_, terms), _ = loss_and_gradient(LossWeights(), 3, drafter, frozen, batch, blocks)
    _, logits, _, q = arrays(drafter, frozen, batch, blocks)
    alpha = np.minimum(softmax(logits), q[..., IDS]).sum(-1)
    mask, reached = np.asarray(blocks["mask"]), slow_reached(batch, blocks)
    assert (reached & ~mask).any()  # what is proposed for a token that can't be drafted is counted: it is rejected
    metrics = losses.metrics_of(terms)
    close(metrics["accept_rate"], (alpha * reached).sum((0, 1)) / reached.sum((0, 1)))
    close(metrics["expected_accepted_length"], (1 + np.cumprod(alpha * reached, -1).sum(-1))[reached.any(-1)].mean())
    w = np.asarray(losses.position_weights(reached, 4.0))
    bce = lambda s: -(alpha * np.log(s) + (1 - alpha) * np.log1p(-s))
    inputs = objective.head_inputs(drafter.config, LossWeights(), drafter.params, frozen, batch, blocks)
    close(metrics["confidence"], (w * bce(1 / (1 + np.exp(-np.float64(inputs[1]["confidence"]))))).sum() / w.sum())
    w = np.asarray(losses.position_weights(mask, 4.0))
    close(metrics["l1"], (w * 2 * (1 - alpha)).sum() / w.sum())


def test_accept_rates_of_a_lattice():
    """Drafts are drawn among the M best of the base logits, so alpha is of the law over these, renormalised."""
    drafter, frozen, batch = setting(execution="lattice", candidates=3)
    blocks = parts(drafter, frozen, batch)
    (_, terms), _ = loss_and_gradient(LossWeights(), 3, drafter, frozen, batch, blocks)
    base, logits, _, q = arrays(drafter, frozen, batch, blocks)
    reached, alpha = np.asarray(blocks["reached"]), np.zeros(base.shape[:-1])
    for i in np.ndindex(alpha.shape):
        ids = slow.top(base[i], 3)
        alpha[i] = np.minimum(softmax(logits[i][ids]), q[i][IDS[ids]]).sum()
    found = losses.metrics_of(terms)
    close(found["accept_rate"], (alpha * reached).sum((0, 1)) / reached.sum((0, 1)))
    w, s = np.asarray(losses.position_weights(reached, 4.0)), 1 / (1 + np.exp(-np.float64(
        objective.head_inputs(drafter.config, LossWeights(), drafter.params, frozen, batch, blocks)[1]["confidence"])))
    close(found["confidence"], -(w * (alpha * np.log(s) + (1 - alpha) * np.log1p(-s))).sum() / w.sum())


@pytest.mark.parametrize("execution", ["sequential", "lattice"])
def test_the_confidence_term_of_the_law(execution):
    """The cross-entropy is that of a logit which has the term more than without, of the best log p, the entropy and the log
    share, p the law that drafts are drawn from and its share that of the law over all tokens; and its gradient goes to the
    term's own parameters alone, not through p to the drafter."""
    drafter, frozen, batch = setting(execution=execution, candidates=3, confidence_with_law=True)
    blocks, only = parts(drafter, frozen, batch), LossWeights(ce=0.0, l1=0.0, confidence=1.0)
    (_, terms), gradient = loss_and_gradient(only, 3, drafter, frozen, batch, blocks)
    base, logits, _, q = arrays(drafter, frozen, batch, blocks)
    reached, alpha = np.asarray(blocks["reached"]), np.zeros(base.shape[:-1])
    sure = np.float64(objective.head_inputs(drafter.config, only, drafter.params, frozen, batch, blocks)[1]["confidence"])
    for i in np.ndindex(alpha.shape):
        ids = slow.top(base[i], 3) if execution == "lattice" else np.arange(len(IDS))
        p, share = softmax(logits[i][ids]), softmax(logits[i])[ids].sum()
        alpha[i] = np.minimum(p, q[i][IDS[ids]]).sum()
        best = np.maximum(np.sort(np.log(p))[::-1][:4], -15)
        best = np.pad(best, (0, 4 - len(best)), constant_values=-15)
        sure[i] += slow.law_term(np.array([*best, -(p * np.log(p)).sum(), np.log(share)]), drafter.params["confidence"]["law"])
    w, s = np.asarray(losses.position_weights(reached, 4.0)), 1 / (1 + np.exp(-sure))
    close(losses.metrics_of(terms)["confidence"], -(w * (alpha * np.log(s) + (1 - alpha) * np.log1p(-s))).sum() / w.sum())
    of_law = np.abs(gradient["confidence"]["law"]["kernel"]).max(axis=-1)
    assert of_law[:5].min() > 0 and (of_law[5] > 0) == (execution == "lattice")
    same(gradient["transition"]["successor"], np.zeros_like(drafter.params["transition"]["successor"]), 0)


@pytest.mark.parametrize("policy", ["exclude", "inject"])
def test_candidates_term(policy):
    drafter, frozen, batch = setting("context")
    blocks = parts(drafter, frozen, batch)
    weights = LossWeights(candidates=1.0, missing_label=policy)
    (_, terms), _ = loss_and_gradient(weights, 3, drafter, frozen, batch, blocks)
    base, _, hidden, _ = arrays(drafter, frozen, batch, blocks)
    table, M = jax.tree.map(np.asarray, drafter.params["transition"]), drafter.config.candidates
    total, weight, recall, accuracy = 0.0, 0.0, [], []
    for i in supervised(blocks["mask"]):
        label, w = int(blocks["labels"][i]), np.exp(-i[-1] / 4)
        ids = slow.top(base[i], M)
        scores, _ = slow.scores("context", table, base[i], int(blocks["predecessors"][i]), hidden[i], None)
        recall.append(label in ids)
        accuracy.append(ids[int(np.argmax(scores[ids]))] == label)
        if label not in ids:
            if policy == "exclude":
                continue
            ids = [*ids[:-1], label]
        total += w * (np.log(np.exp(scores[ids]).sum()) - scores[label])
        weight += w
    assert 0 < np.mean(recall) < 1
    close(terms["candidates"].numerator, total)
    close(terms["candidates"].denominator, weight)
    for name, values in (("candidate_recall", recall), ("candidate_accuracy", accuracy)):
        close(terms[name].numerator.sum(), np.sum(values))
        close(terms[name].denominator.sum(), len(values))


def test_stop_gradient_of_the_candidates_term():
    """It leaves the transition's gradient as it is, and nothing for the rest."""
    drafter, frozen, batch = setting("context")
    blocks = parts(drafter, frozen, batch)
    only = dict(ce=0.0, l1=0.0, confidence=0.0, candidates=1.0)
    (_, stopped), (_, free) = (
        loss_and_gradient(LossWeights(**only, candidates_stop_gradient=stop), 4, drafter, frozen, batch, blocks)
        for stop in (True, False))
    same(stopped["transition"], free["transition"])
    assert not any(np.any(g) for g in jax.tree.leaves(stopped["backbone"]))
    assert all(np.any(g) for g in jax.tree.leaves(free["backbone"]))


# ------------------------------------------------------------------------------------------------------------- memory

SHAPE = dict(anchors=64, T=7, V=20000, D=8, R=4)
ONE_ARRAY = 64 * 7 * 20000 * 4


@pytest.mark.parametrize("terms, reduced", [({}, None), (ALL, None), (ALL, 5000)])
def test_logits_of_all_anchors_never_exist(terms, reduced):
    """Forward and backward together take less than one array of them would."""
    extra = lambda size: benchmark_losses.compile_loss(
        LossWeights(**terms), size=size, reduced=reduced, **SHAPE).memory_analysis().temp_size_in_bytes
    assert extra(4) < ONE_ARRAY
    assert reduced or extra(64) > 2 * ONE_ARRAY  # so the bound means something


def test_the_memory_program_runs():
    result = program.run_module("train.benchmark_losses", "--anchors=8", "--vocabulary=512", "--width=16", "--rank=4",
                                "--sizes=2,8")
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["one", "anchors", "2", "8"]


def test_terms_of_weight_zero_cost_nothing():
    def flops(**terms):
        weights = LossWeights(**dict(ce=0.0, l1=0.0, confidence=0.0) | terms)
        return benchmark_losses.compile_loss(weights, size=64, **SHAPE).cost_analysis()["flops"]

    assert 1.1 * flops(ce=1.0) < flops(ce=1.0, kl=0.1, l1=0.1)


# ------------------------------------------------------------------------------------------------------------ training


KINDS = {
    "dspark": {},
    "dflash": dict(ce=1.0, l1=0.0, confidence=0.0),
    "selector": dict(ce=0.0, l1=0.0, confidence=0.0, unary=1.0, candidates=1.0, candidates_warmup=3),
    "kl": dict(ce=0.0, l1=0.0, confidence=0.0, kl=1.0),
    "total variation": dict(ce=0.0, l1=0.5, confidence=0.0),
    "length": dict(ce=0.0, l1=0.0, confidence=0.0, expected_length=1.0),
    "adaptive": dict(ce=1.0, l1=0.0, confidence=0.0, position_weights="adaptive"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_objective_trains(kind):
    """On one batch again and again the loss falls, and what the objective is for gets better."""
    drafter, frozen, batch = setting("context")
    optimizer = optax.adam(5e-3)
    step = jax.jit(objective.make_step(drafter.config, LossWeights(**KINDS[kind]), optimizer, anchors=16))
    params, state, seen = drafter.params, optimizer.init(drafter.params), []
    for number in range(25):
        params, state, metrics = step(params, state, frozen, batch, jax.random.key(3), number)
        seen.append(metrics)
    first, last = seen[3], seen[-1]  # the warm-up is over
    assert last["loss"] < first["loss"] - 0.05 * abs(first["loss"])
    if kind == "selector":
        assert float(seen[0]["loss"]) == pytest.approx(float(seen[0]["unary"]), rel=1e-5)
        assert last["candidate_accuracy"].mean() > first["candidate_accuracy"].mean()
    elif kind in ("dflash", "adaptive"):  # the tokens are not the target's, so they say nothing of what it accepts
        assert last["ce"] < 0.95 * first["ce"]
    else:
        assert last["expected_accepted_length"] > 1.05 * first["expected_accepted_length"]


def test_unknown_loss_field():
    with pytest.raises(ValueError) as error:
        objective.loss_weights({"ce": 1.0, "cw": 2.0})
    assert str(error.value).startswith("loss.cw: unknown field; allowed: ce, l1, confidence, unary")
    assert objective.loss_weights({"ce": 1.0, "decay": None}) == LossWeights(ce=1.0, decay=None)


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("transition, execution", [("context", "lattice"), ("recurrent", "sequential")])
def test_path_metrics(transition, execution):
    drafter, frozen, batch = setting(transition, execution=execution)
    blocks = parts(drafter, frozen, batch)
    evaluate = block_evaluation.make_evaluation(drafter.config, anchors=7, anchors_per_chunk=3)
    metrics = jax.jit(evaluate)(drafter.params, frozen, batch, jax.random.key(3))
    base, logits, hidden, q = arrays(drafter, frozen, batch, blocks)
    table, M, T = jax.tree.map(np.asarray, drafter.params["transition"]), drafter.config.candidates, 4
    found, mass, forced, walked = ([[] for _ in range(T)] for _ in range(4))
    oracle, path = [], []
    for n in supervised(blocks["mask"].any(-1)):
        anchor, labels = int(batch["tokens"][n[0], blocks["anchors"][n]]), np.asarray(blocks["labels"][n])
        if execution == "lattice":
            drafted, candidates, _ = slow.greedy_lattice(transition, table, base[n], hidden[n], anchor, M, IDS)
        else:
            drafted, _ = slow.greedy_sequential(transition, table, base[n], hidden[n], anchor, IDS)
            candidates = np.array([[IDS[c] for c in slow.top(row, M)] for row in base[n]])
        count = int(blocks["mask"][n].sum())  # a prefix
        alive, best = True, True
        oracle.append(1)
        path.append(1)
        for t in range(count):
            label = IDS[labels[t]]
            allowed = range(len(IDS))
            if execution == "lattice":
                allowed = np.flatnonzero(np.isin(IDS, candidates[t]))
            found[t].append(label in candidates[t])
            mass[t].append(q[n][t][candidates[t]].sum())
            forced[t].append(max(allowed, key=lambda b: logits[n][t][b]) == labels[t])
            if alive:
                walked[t].append(drafted[t] == label)
            alive, best = alive and drafted[t] == label, best and label in candidates[t]
            oracle[-1] += best
            path[-1] += alive
    mean = lambda lists: [np.mean(x) if x else 0 for x in lists]
    close(metrics["candidate_recall"], mean(found))
    close(metrics["candidate_mass"], mean(mass))
    close(metrics["forced_accuracy"], mean(forced))
    close(metrics["path_accuracy"], mean(walked))
    close(metrics["oracle_accepted_length"], np.mean(oracle))
    close(metrics["path_accepted_length"], np.mean(path))
    assert 1 < np.mean(path) < np.mean(oracle)
    # What the step logs too is the same.
    (_, terms), _ = loss_and_gradient(LossWeights(), 7, drafter, frozen, batch, blocks)
    for name, value in losses.metrics_of(terms).items():
        close(metrics[name], value)
