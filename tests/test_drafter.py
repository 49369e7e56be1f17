"""The drafter: against reference numbers of DeepSpec and z-lab, training against drafting, attention against a mask.

What the trained pairs decode from end to end is compared in test_public_checkpoints.
"""

import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pairs
import public_pairs
import slow
from dspark_jax import anchors as anchors_lib
from dspark_jax import backbone as backbone_lib
from dspark_jax import cache as kv
from dspark_jax import convolution, layers, losses, sampling, transitions
from dspark_jax import drafter as drafter_lib
from dspark_jax.confidence import law_statistics
from golden import load

HEADS = ("vanilla", "gated", "rnn", "dflash")
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


training_hidden = jax.jit(drafter_lib.training_hidden, static_argnums=0)


@functools.cache
def pair(name):
    """"vanilla", "gated", "rnn", "dflash" of DeepSpec, "v1", "v2" of z-lab -> (target, drafter)."""
    target = pairs.target("dflash/target_model" if name in ("v1", "v2") else "dspark/target")
    return target, pairs.drafter(f"dflash/draft_{name}" if name in ("v1", "v2") else f"dspark/draft_{name}", target)


@pytest.mark.parametrize("name", [*HEADS, "v1", "v2"])
def test_loaders_read_the_same(name):
    """The library's loaders and the few lines of `pairs` agree on every weight and every field."""
    target, drafter = pair(name)
    theirs = public_pairs.drafter((public_pairs.DEEPSPEC | public_pairs.ZLAB)[name])
    assert theirs.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, theirs.params, drafter.params)
    np.testing.assert_array_equal(theirs.embedding, drafter.embedding)
    np.testing.assert_array_equal(theirs.head_rows, drafter.head_rows)
    loaded = public_pairs.target("dspark" if name in HEADS else "dflash")
    assert loaded.config == target.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, target.params)


# ----------------------------------------------------------------------------------------- training forward, DeepSpec


def deepspec_terms(params, drafter, z):
    """Loss terms, and everything that the reference recorded on the way to them."""
    c, tokens, anchors, keep = drafter.config, z["input_ids"], z["anchors"], z["block_keep_mask"]
    T = c.block_length
    hidden = drafter_lib.training_hidden(c, params, drafter.embedding, z["target_hidden_states"], tokens, anchors, keep)
    predecessors = anchors_lib.predecessors(tokens, anchors, keep, T)
    logits = transitions.teacher_forced_logits(
        transitions.get_transition(c.transition), params.get("transition", {}),
        drafter_lib.base_logits(c, drafter.head_rows, hidden), predecessors, hidden)
    labels = anchors_lib.labels(tokens, anchors, keep, T)
    mask = anchors_lib.evaluation_mask(z["loss_mask"], anchors, keep, T)
    where = anchors_lib.target_indices(anchors, keep, T, tokens.shape[1])
    target_logits = anchors_lib.gather(z["target_last_hidden_states"], where) @ drafter.head_rows.T
    confidence = drafter_lib.block_confidence(c, params, hidden, predecessors)
    terms = losses.drafter_terms(logits, target_logits, labels, mask, confidence, float(z["gamma"]))
    return terms, {"hidden": hidden, "draft_logits": logits, "target_ids": labels, "eval_mask": mask,
                   "aligned_target_logits": target_logits, "confidence_pred": confidence}


@functools.cache
def deepspec_training(head):
    _, drafter = pair(head)
    z = {k: jnp.asarray(v) for k, v in load(f"dspark/train_forward_{head}").items()}
    ce, l1, confidence = (float(w) for w in z["loss_weights"])

    @jax.jit
    def run(params):
        def loss(params):
            terms, arrays = deepspec_terms(params, drafter, z)
            weights = {"ce": ce, "l1": l1, "confidence": confidence if drafter.config.confidence else 0.0}
            return losses.weighted_sum(terms, weights), (terms, losses.metrics_of(terms), arrays)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, aux), gradients = run(drafter.params)
    return z, value, aux, gradients


@pytest.mark.parametrize("head", HEADS)
def test_deepspec_training_forward(head):
    z, value, (terms, metrics, arrays), _ = deepspec_training(head)
    keep = np.asarray(z["block_keep_mask"])
    for name, array in arrays.items():
        if array is None:
            assert name not in z, name
            continue
        same = np.testing.assert_array_equal if array.dtype in (jnp.int32, jnp.bool_) else close
        # A disabled block holds arbitrary numbers in both programs and never enters the loss.
        same(np.asarray(array)[keep], np.asarray(z[name])[keep], err_msg=name)
    close(value, z["total_loss"])
    scale = dict(zip(("ce", "l1", "confidence"), z["loss_weights"]))
    for term, weight in scale.items():
        if weight:  # the reference leaves out what has no weight
            close(terms[term].numerator, z[f"{term}_loss_num"], atol=1e-3, rtol=1e-5, err_msg=term)
            close(terms[term].denominator, z[f"{term}_loss_den"], err_msg=term)
    for j, rate in enumerate(metrics["accept_rate"]):
        close(rate, z[f"metric.accept_rate@{j}"])
    close(metrics["expected_accepted_length"], z["metric.tau_probabilistic"])
    if scale["confidence"]:
        for name in ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
            close(metrics[name], z[f"metric.{name}"], err_msg=name)


@pytest.mark.parametrize("head", HEADS)
def test_deepspec_gradients(head):
    z, _, _, gradients = deepspec_training(head)
    ours = pairs.to_published(gradients)
    unused = {k.removeprefix("grad_is_none.") for k in z if k.startswith("grad_is_none.")}
    norms = {k.removeprefix("grad_norm.") for k in z if k.startswith("grad_norm.")}
    assert norms - unused == set(ours) - unused
    for name in norms - unused:
        close(np.linalg.norm(ours[name]), z[f"grad_norm.{name}"], rtol=1e-4, err_msg=name)
    arrays = {k.removeprefix("grad.") for k in z if k.startswith("grad.")} - unused
    assert len(arrays) > 15
    for name in arrays:
        expected = np.asarray(z[f"grad.{name}"])
        close(ours[name].reshape(expected.shape), expected, err_msg=name)


# -------------------------------------------------------------------------------------------- training forward, z-lab


@pytest.mark.parametrize("version", [1, 2])
def test_zlab_training_forward(version):
    """Block CE and, for DFlash-2, the Selector's CE over the candidates; their gradients down to every tensor."""
    _, drafter = pair(f"v{version}")
    c, z = drafter.config, {k: jnp.asarray(v) for k, v in load(f"dflash/expected/draft_v{version}_train").items()}
    summary = pairs.expected(f"dflash/expected/draft_v{version}_train")
    tokens, anchors, keep = z["input_ids"], z["anchors"], jnp.ones(z["anchors"].shape, bool)
    np.testing.assert_array_equal(
        anchors_lib.block_tokens(tokens, anchors, keep, c.slots, c.mask_token_id), z["block_input_ids"])
    labels = anchors_lib.labels(tokens, anchors, keep, c.block_length)
    predecessors = anchors_lib.predecessors(tokens, anchors, keep, c.block_length)
    # Their label mask has no running AND over the block; ours has (`anchors.evaluation_mask`).
    weights = losses.position_weights(z["label_mask"] > 0, 4.0)

    @jax.jit
    def run(params):
        def loss(params):
            hidden = drafter_lib.training_hidden(
                c, params, drafter.embedding, z["target_hidden"], tokens, anchors, keep)
            logits = drafter_lib.base_logits(c, drafter.head_rows, hidden)
            block = losses.weighted(weights, losses.cross_entropy(logits, labels)).loss()
            if version == 1:
                return block, (hidden, logits, block)
            scores = transitions.teacher_forced_logits(
                transitions.get_transition("context"), params["transition"], logits, predecessors, hidden)
            candidates, _ = sampling.top_candidates(logits, c.candidates)
            scores = jnp.take_along_axis(scores, candidates, axis=-1)
            selector = losses.candidate_cross_entropy(scores, candidates, labels, weights, "exclude").loss()
            return block + selector, (hidden, logits, block, candidates, scores, selector)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, (hidden, logits, block, *selector)), gradients = run(drafter.params)
    inside = np.asarray(z["label_mask"]) > 0  # a label past the end of the sequence is not one
    np.testing.assert_array_equal(np.asarray(labels)[inside], np.asarray(z["labels"])[inside])
    close(weights, z["weights_gamma4"], atol=1e-6)
    close(hidden, z["hidden"])
    close(logits, z["logits"])
    close(np.asarray(losses.cross_entropy(logits, labels))[inside], np.asarray(z["token_nll"])[inside])
    close(block, summary["block_ce_gamma4"])
    close(value, summary["total_loss_gamma4"])
    if version == 2:
        candidates, scores, term = selector
        np.testing.assert_array_equal(np.asarray(predecessors)[inside], np.asarray(z["predecessors"])[inside])
        np.testing.assert_array_equal(candidates, z["candidates"])
        close(np.asarray(scores)[inside], np.asarray(z["selector_scores"])[inside])
        close(term, summary["selector_ce_excluded_gamma4"])
    ours = pairs.to_published(gradients, zlab=True)
    assert set(ours) == set(summary["grad_l2_of_total_loss"])
    for name, norm in summary["grad_l2_of_total_loss"].items():
        close(np.linalg.norm(ours[name]), norm, rtol=1e-4, err_msg=name)
    for key in z:
        if key.startswith("grad:"):
            close(ours[key.removeprefix("grad:")], z[key], err_msg=key)


# ------------------------------------------------------------------------------------------------ the first few rounds


@functools.partial(jax.jit, static_argnames=("config",))
def recorded(config, arrays, cache, anchors, starts):
    """`propose` as it is at temperature 0, and the hidden states and base logits that it computed on the way."""
    seen, original = {}, drafter_lib.base_logits

    def base_logits(config, head_rows, hidden):
        seen["hidden"], seen["base_logits"] = hidden, original(config, head_rows, hidden)
        return seen["base_logits"]

    with unittest.mock.patch.object(drafter_lib, "base_logits", base_logits):
        proposal = drafter_lib.propose(
            config, arrays["params"], arrays["embedding"], arrays["head_rows"], arrays["draft_to_target"], cache,
            anchors, starts, jax.random.split(jax.random.key(0), anchors.shape[0]), 0.0, config.execution,
            config.candidates)
    return proposal, seen


def propose(drafter, cache, anchor, start):
    """One block behind one anchor, without the batch axis -> (proposal, hidden [T, D], base logits [T, V])."""
    proposal, seen = recorded(drafter.config, drafter.arrays(), cache, jnp.array([anchor], jnp.int32),
                              jnp.array([start], jnp.int32))
    return jax.tree.map(lambda a: a[0], (proposal, seen["hidden"], seen["base_logits"]))


@functools.partial(jax.jit, static_argnames=("config",))
def extend(config, params, features, starts, cache):
    positions = starts[:, None] + jnp.arange(features.shape[1])
    new = drafter_lib.DrafterModule(config).apply(
        {"params": params}, features, positions, method=drafter_lib.DrafterModule.context)
    return jax.tree.map(lambda c, n: kv.write(c, n, starts), cache, new)


def empty(config, batch=1, length=192):
    """A cache full of garbage: nothing that was not written may be seen."""
    b = config.backbone
    pairs_ = kv.empty_cache(b.num_hidden_layers, batch, length, b.num_key_value_heads, b.head_dim)
    return jax.tree.map(lambda a: a + 1e3, pairs_)


def pad(features, multiple=32):
    """Right padding, as decoding leaves it: later rounds overwrite it or don't see it. Few compiled shapes."""
    features = np.asarray(features)
    return jnp.asarray(np.pad(features, ((0, -len(features) % multiple), (0, 0)), constant_values=7.0)[None])


@pytest.mark.parametrize("head", HEADS)
def test_deepspec_rounds(head):
    """Features are the target's own, read between rounds; the draft cache grows by what was verified."""
    target, drafter = pair(head)
    c = drafter.config
    z, summary = load(f"dspark/expected_{head}"), pairs.expected(f"dspark/expected_{head}")
    for i, prompt in enumerate(summary["prompts"]):
        ids, cache = prompt["output_ids"], empty(c)
        states = target.hidden_states(np.array([ids + [0] * (224 - len(ids))]))
        features = np.concatenate([np.asarray(states[t + 1][0]) for t in c.target_layer_ids], axis=-1)
        if f"p{i}.prefill_context" in z:
            n = len(prompt["prompt_ids"])
            close(features[:n], z[f"p{i}.prefill_context"])
        old, start = 0, len(prompt["prompt_ids"])
        for r in range(3):
            expected, key = prompt["rounds"][r], f"p{i}.r{r}."
            assert ids[start] == expected["anchor_token"]
            cache = extend(c, drafter.params, pad(features[old:start]), jnp.array([old]), cache)
            proposal, hidden, base_logits = propose(drafter, cache, ids[start], start)
            np.testing.assert_array_equal(proposal.tokens, expected["sampled_tokens"])
            np.testing.assert_array_equal(proposal.tokens, z[f"{key}sampled_tokens"])
            close(hidden, z[f"{key}hidden"])
            close(base_logits, z[f"{key}base_logits"])
            previous = jnp.array([ids[start], *expected["sampled_tokens"][:-1]])
            corrected = transitions.teacher_forced_logits(
                transitions.get_transition(c.transition), drafter.params.get("transition", {}), base_logits, previous,
                hidden)
            close(corrected, z[f"{key}corrected_logits"])
            np.testing.assert_array_equal(np.argmax(proposal.q, axis=-1), z[f"{key}sampled_tokens"])
            if c.confidence:
                close(proposal.confidence, z[f"{key}confidence_logits"])
            else:
                assert proposal.confidence is None
            old, start = start, start + expected["accepted"] + 1


@pytest.mark.parametrize("version", [1, 2])
def test_zlab_rounds(version):
    """The context features of each round are given."""
    _, drafter = pair(f"v{version}")
    c = drafter.config
    z = load(f"dflash/expected/draft_v{version}_rounds")
    for i in range(5):
        cache = empty(c)
        for r in range(3):
            key = f"p{i}_r{r}_"
            start, new, block = int(z[f"{key}start"]), z[f"{key}new_context"], z[f"{key}block_ids"]
            assert list(block[1:]) == [c.mask_token_id] * c.block_length
            cache = extend(c, drafter.params, pad(new), jnp.array([start - len(new)]), cache)
            proposal, hidden, base_logits = propose(drafter, cache, int(block[0]), start)
            close(hidden, z[f"{key}hidden"])
            close(base_logits, z[f"{key}logits"])
            np.testing.assert_array_equal(proposal.tokens, z[f"{key}draft_tokens"])
            if version == 2:
                np.testing.assert_array_equal(proposal.q.ids, z[f"{key}candidates"])
                previous = np.append(block[:1], z[f"{key}draft_tokens"][:-1])
                scores = transitions.teacher_forced_logits(
                    transitions.get_transition("context"), drafter.params["transition"], base_logits, previous, hidden)
                close(np.take_along_axis(np.asarray(scores), z[f"{key}candidates"], -1), z[f"{key}path_scores"])


@pytest.mark.parametrize("execution", ["sequential", "lattice"])
def test_one_temperature_a_row(execution):
    """Greedy and sampled rows may share a batch: each draws what it would draw in a batch of its own kind."""
    drafter = pairs.random_drafter(pairs.random_target(), transition="vanilla")
    c, anchors = drafter.config, jnp.array([3, 3, 5, 5])

    @jax.jit
    def draft(temperature):
        return drafter_lib.propose(
            c, drafter.params, drafter.embedding, drafter.head_rows, None, empty(c, 4, 8), anchors,
            jnp.zeros(4, jnp.int32), jax.random.split(jax.random.key(0), 4), temperature, execution, 4)

    mixed, greedy, warm = draft(jnp.array([0.0, 0.7, 0.7, 0.0])), draft(0.0), draft(0.7)
    sampled = np.array([False, True, True, False])
    for row, cold, hot in zip(*map(jax.tree.leaves, (mixed, greedy, warm))):
        pick = sampled.reshape(-1, *[1] * (row.ndim - 1))
        np.testing.assert_array_equal(row, np.where(pick, hot, cold))
    assert (np.asarray(greedy.tokens) != np.asarray(warm.tokens)).any()


@pytest.mark.parametrize("M", [3, 6])
def test_law_statistics(M):
    """The four best log-probabilities, -15 for what is below it or not there, the entropy and the share."""
    scores = np.random.default_rng(0).normal(size=(3, 4, M)) * 3
    scores[..., 2] = -np.inf  # a token that cannot be drafted
    scores[0, 0, 1] = -40.0
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(p * np.log(p), axis=-1)
    for others in (None, np.array([[0.5], [2.0], [40.0]]) * np.ones((3, 4))):  # of the law over all tokens, but for these
        share = np.ones((3, 4)) if others is None else 1 / (1 + others)
        log_normalizer = None if others is None else jnp.log(np.exp(scores).sum(-1) * (1 + others)).astype(jnp.float32)
        with np.errstate(divide="ignore"):
            best = np.log(np.concatenate([np.sort(p, axis=-1)[..., ::-1], np.zeros((3, 4, 1))], axis=-1))[..., :4]
        expected = np.concatenate([np.maximum(best, -15), np.stack([entropy, np.log(share)], axis=-1)], axis=-1)
        close(law_statistics(jnp.asarray(scores, jnp.float32), log_normalizer), expected)


@pytest.mark.parametrize("transition", ["none", "joint", "recurrent"])
@pytest.mark.parametrize("execution, M", [("sequential", 24), ("lattice", 24), ("lattice", 5)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_confidence_sees_the_law_at_temperature_1(transition, execution, M, temperature):
    """Of every draft along the path, over the tokens that it may be, and never the token that it is."""
    if transition == "recurrent" and execution == "lattice":
        return
    target = pairs.random_target()
    fields = {"confidence_with_predecessor": transition != "none", "confidence_with_law": True}
    drafter = pairs.random_drafter(target, draft_ids=np.arange(0, 48, 2), transition=transition, confidence=True, **fields)
    c, params, anchors, starts = drafter.config, drafter.params, jnp.array([3, 9, 5]), jnp.zeros(3, jnp.int32)
    proposal = jax.jit(lambda: drafter_lib.propose(
        c, params, drafter.embedding, drafter.head_rows, drafter.draft_to_target, empty(c, 3, 8), anchors, starts,
        jax.random.split(jax.random.key(0), 3), temperature, execution, M))()
    hidden = drafter_lib.block_hidden(c, params, drafter.embedding, empty(c, 3, 8), anchors, starts)
    base = drafter_lib.base_logits(c, drafter.head_rows, hidden)
    predecessors = jnp.concatenate([anchors[:, None], proposal.tokens[:, :-1]], axis=1)
    scores = np.array(transitions.teacher_forced_logits(
        transitions.get_transition(transition), params.get("transition", {}), base, predecessors, hidden), np.float64)
    everything = np.exp(scores).sum(-1)
    scores[np.asarray(base) < np.sort(base, axis=-1)[..., -M, None]] = -np.inf
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)
    share = np.log(np.exp(scores).sum(-1) / everything)
    best = np.sort(np.log(np.maximum(p, np.exp(-15))), axis=-1)[..., -4:][..., ::-1]
    law = slow.law_term(np.concatenate([best, np.stack([entropy, share], axis=-1)], axis=-1), params["confidence"]["law"])
    bare = drafter_lib.block_confidence(c, params, hidden, predecessors)
    close(proposal.confidence, bare + law)
    assert np.abs(law).max() > 0.1 and (np.abs(share).max() > 0.01) == (M == 5)


# --------------------------------------------------------------------------------------------- training is decoding


@pytest.mark.parametrize("before", [0, 11], ids=["alone", "packed"])
@pytest.mark.parametrize("layout, conv", [("anchor_first", 0), ("fill_in", 2)])
def test_training_hidden_equals_cached_hidden(layout, conv, before):
    """A block in a training batch, also with other documents ``before`` and behind its own in the row, and the same
    block drafted with the context written piece by piece."""
    target = pairs.random_target()
    drafter = pairs.random_drafter(target, layout=layout, conv_kernel_size=conv, layers=2)
    c, rng = drafter.config, np.random.default_rng(0)
    tokens = rng.integers(0, 48, (1, 40)).astype(np.int32)
    anchors = np.array([[0, 1, 9, 23, 38]], np.int32)  # the last block reaches over the end
    features = np.concatenate([np.asarray(target.hidden_states(tokens)[t + 1]) for t in c.target_layer_ids], axis=-1)
    documents = np.repeat([1, 2, 3], [before, 40, before])[None] if before else None
    around = lambda x, of: np.concatenate([of(x[:, :before]), x, of(x[:, :before])], axis=1)
    hidden = training_hidden(
        c, drafter.params, drafter.embedding, around(features, lambda x: 9 * x), around(tokens, np.flip),
        anchors + before, np.ones(anchors.shape, bool), documents)
    cache, old = empty(c, length=64), 0
    for n, start in enumerate(anchors[0]):
        cache = extend(c, drafter.params, pad(features[0, old:start], 16), jnp.array([old]), cache)
        _, cached, _ = propose(drafter, cache, tokens[0, start], int(start))
        close(cached, hidden[0, n], atol=1e-5 * np.abs(hidden).max())
        old = int(start)


def dense_attention(query, context, block, visible):
    """One head, one query at a time over one long list of keys: [B, N, J, H, C] in, [B, N*J, H*C] out."""
    B, N, J, H, C = query.shape
    keys, values = (np.concatenate([c, b.reshape(B, -1, *b.shape[3:])], axis=1) for c, b in zip(context, block))
    group = H // keys.shape[2]
    out = np.zeros((B, N * J, H, C))
    flat = query.reshape(B, N * J, H, C)
    for b, q, h in np.ndindex(B, N * J, H):
        s = keys[b, :, h // group] @ flat[b, q, h] / np.sqrt(C)
        w = np.exp(s - s[visible[b, q]].max()) * visible[b, q]
        out[b, q, h] = w / w.sum() @ values[b, :, h // group]
    return out.reshape(B, N, J, H * C)


def test_attention_equals_dense_mask():
    rng = np.random.default_rng(0)
    B, N, J, S, H, K, C = 2, 3, 4, 9, 4, 2, 6
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    query, context, block = normal(B, N, J, H, C), normal(2, B, S, K, C), normal(2, B, N, J, K, C)
    anchors, keep = np.array([[0, 4, 8], [2, 3, 9]]), np.ones((B, N), bool)
    visible = anchors_lib.block_visibility(anchors, keep, S, J)
    expected = dense_attention(query, context, block, np.asarray(visible))
    seen = np.arange(S) < anchors[..., None]
    got = backbone_lib.attend_context_and_block(query, tuple(context), tuple(block), seen)
    close(got, expected, atol=1e-5)
    # And what is not visible can be anything.
    hidden = np.where(seen.any(1)[..., None, None], context, 1e9).astype(np.float32)
    np.testing.assert_array_equal(
        got, backbone_lib.attend_context_and_block(query, tuple(hidden), tuple(block), seen))


def test_convolution_starts_as_the_identity():
    """A fresh convolution changes nothing, so DFlash weights can be taken over."""
    target = pairs.random_target()
    plain = pairs.random_drafter(target, layout="fill_in", layers=2)
    convolved = pairs.random_drafter(target, layout="fill_in", layers=2, conv_kernel_size=2)
    fresh = jax.jit(drafter_lib.init_params, static_argnums=0)(convolved.config, jax.random.key(0))
    for i in range(2):
        layer = dict(plain.params["backbone"][f"layers_{i}"])
        for name in ("attention_conv", "mlp_conv"):
            layer[name] = fresh["backbone"][f"layers_{i}"][name]
            np.testing.assert_array_equal(layer[name]["base_kernel"], convolution.identity_base(2, 32))
        fresh["backbone"][f"layers_{i}"] = layer
    for name in ("fc", "hidden_norm", "norm"):
        fresh["backbone"][name] = plain.params["backbone"][name]
    rng = np.random.default_rng(0)
    tokens, anchors = rng.integers(0, 48, (2, 12)).astype(np.int32), np.array([[3, 8], [0, 5]], np.int32)
    features = rng.normal(size=(2, 12, 64)).astype(np.float32)
    run = lambda config, params: training_hidden(
        config, params, plain.embedding, features, tokens, anchors, np.ones((2, 2), bool))
    np.testing.assert_array_equal(run(convolved.config, fresh), run(plain.config, plain.params))


def test_multiplier_and_softcap():
    target = pairs.random_target()
    drafter = pairs.random_drafter(target, output_multiplier=0.5, final_logit_softcapping=3.0)
    hidden = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    plain = hidden @ np.asarray(drafter.head_rows).T
    close(drafter_lib.base_logits(drafter.config, drafter.head_rows, hidden), 3 * np.tanh(plain / 2 / 3), atol=1e-5)
    close(layers.scale_logits(plain, 1.0, 0.0), plain, atol=0)


# -------------------------------------------------------------------------------------------------------- bad config


@pytest.mark.parametrize("fields, message", [
    ({"transition": "markov"}, "transition: unknown name 'markov'; allowed: none, vanilla, context, joint, recurrent"),
    ({"layout": "dspark"}, "layout: unknown name 'dspark'; allowed: anchor_first, fill_in"),
    ({"execution": "greedy"}, "execution: unknown name 'greedy'; allowed: sequential, lattice"),
    ({"execution": "lattice", "transition": "recurrent"}, "'recurrent' depends on the whole path; use 'sequential'"),
    ({"execution": "lattice", "candidates": 49}, r"candidates: 49; must lie in \[1, 48\], the draft vocabulary"),
    ({"block_length": 0}, "block_length: 0; must be at least 1"),
    ({"draft_vocab_size": 49}, "draft_vocab_size: 49 exceeds vocab_size 48"),
    ({"mask_token_id": 48}, r"mask_token_id: 48; must lie in \[0, 48\)"),
    ({"target_layer_ids": (1, 0)}, r"target_layer_ids: \(1, 0\); must be strictly increasing and not empty"),
    ({"target_layer_ids": ()}, r"target_layer_ids: \(\); must be strictly increasing and not empty"),
    ({"target_layer_ids": (-2, 0)}, r"the smallest allowed is -1, the embedding"),
    ({"target_layer_ids": (0, 2)}, r"target_layer_ids: \(0, 2\); the target's layers are 0..1"),
    ({"confidence": True, "transition": "none"}, "confidence_with_predecessor: needs a transition"),
    ({"confidence_with_law": True}, "confidence_with_law: True; allowed: False for a drafter without a confidence head"),
    ({"vocab_size": 50, "draft_vocab_size": 50}, "vocab_size: the drafter has 50, the target 48; they must be equal"),
    ({"draft_vocab_size": 40}, "draft_to_target: needed exactly where draft_vocab_size is smaller than vocab_size"),
])
def test_bad_config(fields, message):
    with pytest.raises(ValueError, match=message):
        pairs.random_drafter(pairs.random_target(), **fields)
