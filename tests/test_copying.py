"""The copy term against a slow search, and the same in drafting, training and decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import dspark_jax as ds
import pairs
from dspark_jax import copying, lattice, transitions, union
from dspark_jax.checkpoints import conversions
from dspark_jax.sampling import probabilities
from dspark_jax.sequential import sequential_draft
from train import features, loop, objective

T, V, D, R, M = 5, 12, 6, 3, 4


def slow_find(text, last, N, T, begin):
    """The longest earlier agreement, by comparing slices."""
    for n in range(min(N, last + 1 - begin), 0, -1):
        for place in range(last - 1, begin + n - 2, -1):
            if text[place - n + 1:place + 1] == text[last - n + 1:last + 1]:
                following = text[place + 1:last + 1]
                return [following[t % len(following)] for t in range(T)], n
    return [-1] * T, 0


@pytest.mark.parametrize("vocabulary", [2, 3, 20])
@pytest.mark.parametrize("N", [1, 3, 8])
def test_find(vocabulary, N):
    find = jax.jit(copying.find, static_argnums=(2, 3))
    random = np.random.default_rng(vocabulary)
    for _ in range(60):
        text = random.integers(vocabulary, size=18).tolist()
        last, begin = int(random.integers(18)), int(random.integers(4))
        begin = min(begin, last)
        tokens, n = find(jnp.array(text), last, N, T, begin)
        assert (tokens.tolist(), int(n)) == slow_find(text, last, N, T, begin)


def test_find_sees_nothing_behind_the_anchor():
    text = jnp.array([5, 1, 2, 3, 4, 1, 2, 9, 9])
    other = text.at[7:].set(jnp.array([1, 2]))
    for found, same in zip(copying.find(text, 6, 4, 3), copying.find(other, 6, 4, 3)):
        np.testing.assert_array_equal(found, same)
    assert copying.find(text, 6, 4, 6)[0].tolist() == [3, 4, 1, 2, 3, 4]  # goes on from its own beginning


def test_draft_ids():
    tokens = jnp.array([[7, 2, -1], [9, 0, 4]])
    assert copying.draft_ids(tokens, jnp.array([2, 4, 9])).tolist() == [[-1, 0, -1], [2, -1, 1]]
    assert copying.draft_ids(tokens, None).tolist() == tokens.tolist()


def setting(seed=0, draft=None):
    """(transition parameters, base logits [T, Vd], hidden [T, D], anchor, copied, draft_to_target)"""
    keys = iter(jax.random.split(jax.random.key(seed), 10))
    draft_to_target = None if draft is None else jnp.sort(jax.random.permutation(next(keys), V)[:draft])
    Vd = draft or V
    shapes = transitions.get_transition("joint").parameter_shapes(V, Vd, D, R)
    params = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    logits, hidden = jax.random.normal(next(keys), (T, Vd)), jax.random.normal(next(keys), (T, D))
    text = jax.random.randint(next(keys), (30,), 0, V)
    text = text.at[20:26].set(text[4:10])
    tokens, n = copying.find(text, 25, 4, T)
    weights = {"weight": jnp.array([1.0, 2.0, 4.0, 6.0]), "kernel": 0.3 * jax.random.normal(next(keys), (D,))}
    copied = copying.copied(weights, hidden, text[25], tokens, copying.draft_ids(tokens, draft_to_target), n)
    return params, logits, hidden, text[25], copied, draft_to_target


def test_strengths():
    """One weight per length of agreement, which grows along the block, and the gate of the hidden state."""
    weights = {"weight": jnp.array([1.0, 2.0, 4.0]), "kernel": jnp.array([0.5, -1.0])}
    hidden = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    tokens = jnp.array([3, 4, 5])
    copied = copying.copied(weights, hidden, jnp.int32(9), tokens, tokens, jnp.int32(2))
    np.testing.assert_allclose(copied.bonus, [2 + 0.5, 4 - 2, 4 - 0.5])
    assert copied.before.tolist() == [9, 3, 4]
    np.testing.assert_allclose(copied.agreement, [2 / 3, 1, 1])
    new = copying.copied(weights, hidden, jnp.int32(9), jnp.full(3, -1), jnp.full(3, -1), jnp.int32(0))
    assert new.agreement.tolist() == [0, 0, 0]


def test_statistics():
    """The agreement and the chance of the copied token: behind what was copied only, and 0 for one that cannot be drafted."""
    copied = copying.Copied(jnp.array([9, 3, 4]), jnp.array([1, 2, -1]), jnp.ones(3), jnp.array([0.5, 0.75, 1.0]))
    ids, scores = jnp.array([[1, 0, 5]] * 3), jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
    for previous, expected in (([9, 3, 4], [[0.5, 0.2], [0.75, 0], [1, 0]]), ([8, 3, 9], [[0, 0], [0.75, 0], [0, 0]])):
        np.testing.assert_allclose(copying.statistics(copied, jnp.array(previous), ids, scores), expected, rtol=1e-6)


def slow_scores(params, logits, hidden, copied, previous, ids):
    """S_t(a_t, .) [T, Vd] with the term added one number at a time. ids: target id of each draft id."""
    scores = np.array(transitions.teacher_forced_logits(
        transitions.get_transition("joint"), params, logits, previous, hidden))
    for t in range(T):
        if int(previous[t]) == int(copied.before[t]) and copied.ids[t] >= 0:
            scores[t, int(copied.ids[t])] += float(copied.bonus[t])
    return scores


@pytest.mark.parametrize("draft", [None, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_executions_agree(draft, temperature):
    """Sequential, lattice over the whole vocabulary and the written-out scores have one law; fewer candidates read it."""
    transition = transitions.get_transition("joint")
    for seed in range(8):
        params, logits, hidden, anchor, copied, to_target = setting(seed, draft=draft)
        ids = np.arange(V) if to_target is None else np.asarray(to_target)
        key = jax.random.key(seed)
        tokens, q, corrected = sequential_draft(transition, params, logits, hidden, anchor, key, temperature, to_target, copied)
        previous = jnp.concatenate([anchor[None], tokens[:-1]])
        expected = slow_scores(params, logits, hidden, copied, previous, ids)
        np.testing.assert_allclose(corrected, expected, atol=1e-5)
        everything = lattice.lattice_draft(
            transition, params, logits, hidden, anchor, key, temperature, len(ids), to_target, copied=copied)
        for M in (len(ids), 4):
            path, among, law = everything if M == len(ids) else lattice.lattice_draft(
                transition, params, logits, hidden, anchor, key, temperature, M, to_target, copied=copied)
            previous = jnp.concatenate([anchor[None], path[:-1]])
            expected = slow_scores(params, logits, hidden, copied, previous, ids)
            position = {int(token): i for i, token in enumerate(ids)}
            read = np.array([[expected[t, position[int(b)]] for b in row] for t, row in enumerate(among)])
            np.testing.assert_allclose(law, probabilities(jnp.array(read), temperature), atol=1e-5)
            for t in range(T):
                assert copied.ids[t] < 0 or int(ids[copied.ids[t]]) in among[t].tolist()
        if temperature == 0:
            np.testing.assert_array_equal(tokens, everything[0])


def test_union_has_the_term():
    transition = transitions.get_transition("joint")
    for seed in range(4):
        params, logits, hidden, anchor, copied, _ = setting(seed)
        successors = union.successor_table(params, 3)
        ids, unary = copying.admit(*lattice.top_candidates(logits, M), logits, copied)
        path, among, law = union.union_among(transition, params, ids, unary, hidden, anchor, jax.random.key(seed), 0.8, logits,
                                             successors, copied=copied)
        previous = jnp.concatenate([anchor[None], path[:-1]])
        expected = slow_scores(params, logits, hidden, copied, previous, np.arange(V))
        for t in range(T):
            kept = {}
            for b, p in zip(among[t].tolist(), law[t].tolist()):
                kept[b] = kept.get(b, 0.0) + p
            whole = np.exp(expected[t, list(kept)] / 0.8)
            np.testing.assert_allclose(list(kept.values()), whole / whole.sum(), atol=1e-5)


def test_without_a_match_nothing_changes():
    params, logits, hidden, anchor, copied, _ = setting()
    nothing = copied._replace(ids=jnp.full(T, -1))
    transition = transitions.get_transition("joint")
    for draft in (sequential_draft, lambda *block, copied=None: lattice.lattice_draft(*block, M, copied=copied)):
        block = transition, params, logits, hidden, anchor, jax.random.key(3), 0.7
        for mine, theirs in zip(draft(*block, copied=nothing), draft(*block)):
            np.testing.assert_array_equal(mine, theirs)


def test_admit():
    ids, scores = jnp.array([[3, 1, 0], [3, 1, 0], [3, 1, 0]]), jnp.array([[3.0, 2.0, 1.0]] * 3)
    logits = jnp.arange(15.0).reshape(3, 5) / 10
    copied = copying.Copied(jnp.zeros(3, jnp.int32), jnp.array([4, 1, -1]), jnp.ones(3), jnp.ones(3))
    kept, read = copying.admit(ids, scores, logits, copied)
    assert kept.tolist() == [[3, 1, 4], [3, 1, 0], [3, 1, 0]]
    np.testing.assert_allclose(read, [[3, 2, 0.4], [3, 2, 1], [3, 2, 1]])


def test_gradients():
    _, logits, hidden, anchor, copied, _ = setting()
    previous, ids = copied.before, copied.ids

    def loss(weight, kernel):
        strong = copying.copied({"weight": weight, "kernel": kernel}, hidden, anchor, jnp.append(previous[1:], 0), ids,
                                jnp.int32(2))
        return jnp.sum(jax.nn.logsumexp(logits + copying.term(strong, previous, jnp.arange(V)), axis=-1))

    check_grads(loss, (jnp.array([1.0, 2.0, 3.0]), jnp.ones(D)), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_sixteen_bit_parameters_give_a_float32_bonus():
    weights = {"weight": jnp.array([1.0, 2.5], jnp.bfloat16), "kernel": jnp.zeros(D, jnp.bfloat16)}
    tokens = jnp.zeros(T, jnp.int32)
    copied = copying.copied(weights, jnp.ones((T, D), jnp.bfloat16), jnp.int32(0), tokens, tokens, jnp.int32(1))
    assert copied.bonus.dtype == jnp.float32
    np.testing.assert_allclose(copied.bonus, [1.0, 2.5, 2.5, 2.5, 2.5])



# ------------------------------------------------------------------------------------------- training and decoding


IDS = np.arange(2, 48, 2)


def copying_drafter(target, weight=2.0, **fields):
    drafter = pairs.random_drafter(target, draft_ids=IDS, transition="joint", copy_length=3, **fields)
    drafter.params["copying"]["weight"] = weight * jnp.array([1.0, 1.5, 2.0])
    return drafter


@pytest.mark.parametrize("execution", ["sequential", "lattice"])
@pytest.mark.parametrize("packed", [False, True])
def test_training_is_decoding(execution, packed):
    """The law of the first draft, the candidates and the confidence: of a block in training, also where its document lies
    behind another one in the row, and of the same block where the text is decoded."""
    target = pairs.random_target()
    drafter = copying_drafter(target, execution=execution, candidates=3, confidence=True, confidence_with_law=True)
    c, T = drafter.config, drafter.config.block_length
    rng = np.random.default_rng(0)
    text = rng.choice([2, 3, 4, 6, 8], 40).astype(np.int32)  # 3 cannot be drafted
    before = rng.choice([2, 3, 4, 6, 8], 24 if packed else 0).astype(np.int32)
    tokens = jnp.asarray(np.concatenate([before, text]))[None]
    documents = jnp.asarray(np.repeat([4, 2], [len(before), len(text)]))[None] if packed else None
    rows = features.rows_of(target.config, target.params, tokens, c.target_layer_ids, documents)
    anchors = np.arange(3, 34)
    batch = {"tokens": tokens, "loss_mask": jnp.ones(tokens.shape), "features": rows} | (
        {"documents": documents} if packed else {})
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "target_to_draft": loop.inverse(IDS, 48),
              "draft_to_target": drafter.draft_to_target, "target_head": target.head_rows()}
    blocks = objective.blocks_at(c, batch, frozen["target_to_draft"], jnp.asarray(anchors + len(before))[None],
                                 jnp.ones((1, len(anchors)), bool))
    shared, inputs, fixed, fixed_rows = objective.head_inputs(
        c, objective.LossWeights(), drafter.params, frozen, batch, blocks)
    base, logits, target_logits, log_normalizer = objective.laws(c, shared, inputs, fixed, fixed_rows)
    among = objective.drafted_among(c, base, lattice.top_candidates, objective.copied_of(inputs, fixed_rows))
    sure, accept = objective.confidence_and_accept_rate(
        c, shared, inputs, fixed_rows, among, logits, target_logits, log_normalizer, lattice.top_candidates)
    if among is not None:
        assert np.all(among.sum(-1) == 3)
        logits = jnp.where(among, logits, -jnp.inf)
        assert accept.shape == logits.shape[:-1]
    expected = jax.nn.softmax(logits, axis=-1)[0, :, 0]

    features_of_text = rows[:, len(before):, :-c.backbone.hidden_size]

    def one(anchor):
        positions = jnp.arange(len(text))[None]
        pair = ds.drafter.DrafterModule(c).apply({"params": drafter.params}, features_of_text, positions,
                                       method=ds.drafter.DrafterModule.context)
        cache = jax.tree.map(lambda x: x.swapaxes(1, 2), pair)
        seen = jnp.where(jnp.arange(len(text)) <= anchor, text, rng.integers(48))  # what lies behind is anything
        return ds.drafter.propose(c, drafter.params, drafter.embedding, drafter.head_rows, drafter.draft_to_target, cache,
                                  seen[anchor][None], anchor[None], jax.random.split(jax.random.key(1), 1), 1.0, execution,
                                  3 if execution == "lattice" else None, text=seen[None])

    proposal = jax.jit(jax.vmap(one))(jnp.asarray(anchors))
    dense = np.zeros((len(anchors), 48))
    np.add.at(dense, (np.arange(len(anchors))[:, None], proposal.q.ids[:, 0, 0]), proposal.q.probabilities[:, 0, 0])
    np.testing.assert_allclose(dense[:, IDS], expected, atol=1e-5)
    np.testing.assert_allclose(proposal.confidence[:, 0, 0], sure[0, :, 0], atol=1e-4)
    found = np.asarray(fixed_rows["copy_ids"])[0, :, 0]
    assert 5 < (found >= 0).sum() and (found < 0).sum() > 2  # copied, and not to be drafted


def looping_target():
    """A target that says the same ten tokens again and again: its only layer does nothing, and its output table has the
    successor of each token on top."""
    loop = [5, 9, 2, 7, 30, 11, 4, 17, 22, 8]
    target = pairs.random_target(tie_word_embeddings=False, depth=0.0, stop_tokens=())
    embedding = np.asarray(target.embedding())
    head = np.zeros_like(embedding)
    for token, following in zip(loop, [*loop[1:], loop[0]]):
        head[following] += embedding[token]
    target.params["lm_head"]["weight"] = jnp.asarray(head)
    return target


@pytest.mark.parametrize("execution", ["sequential", "lattice"])
def test_a_loop_is_copied(execution):
    """Text that repeats itself is accepted in whole blocks, and is what the target says; a drafter that copies nothing
    is accepted as little as before. Rows of different lengths, and a streamed text, are no exception."""
    target = looping_target()
    drafter = pairs.random_drafter(target, transition="joint", copy_length=3, execution=execution)
    drafter.params["copying"] = {"weight": jnp.full(3, 50.0), "kernel": jnp.zeros(target.config.hidden_size)}
    prompts = [[5, 9, 2], [40, 41, 17, 22, 8, 5, 9], [30]]
    said = ds.generate(target, drafter, prompts, max_new_tokens=60)
    assert said.tokens == ds.generate(target, None, prompts, max_new_tokens=60).tokens
    for accepted in said.accepted:
        assert accepted[-4:-1] == [4, 4, 4]  # of four drafts; the last round is cut
        assert np.mean(accepted[:2]) < 2
    parts = list(ds.stream(target, drafter, prompts[:1], max_new_tokens=60, rounds=2))
    assert ds.Result.join(parts).tokens == said.tokens[:1]
    without = ds.generate(target, conversions.without_copying(drafter), prompts, max_new_tokens=60)
    assert without.tokens == said.tokens and without.accepted_length < 2 < 2.5 < said.accepted_length


def test_saved_and_loaded(tmp_path):
    target = pairs.random_target()
    drafter = copying_drafter(target, target_layer_ids=(-1, 0))  # the last layer's output is refused elsewhere
    ds.save_drafter(drafter, tmp_path / "native", dtype="float32")
    again = ds.load_drafter(tmp_path / "native", target)
    assert again.config == drafter.config
    np.testing.assert_array_equal(again.params["copying"]["weight"], drafter.params["copying"]["weight"])
    with pytest.raises(ValueError, match="layout 'speculators' cannot express copy_length 3; allowed: 0"):
        ds.save_drafter(drafter, tmp_path / "other", "speculators")
    assert not (tmp_path / "other").exists()
    ds.save_drafter(conversions.without_copying(drafter), tmp_path / "other", "speculators")


def test_a_draft_needs_the_text():
    drafter = copying_drafter(pairs.random_target())
    with pytest.raises(ValueError, match="text: None; allowed: the tokens so far"):
        ds.drafter.propose(drafter.config, drafter.params, drafter.embedding, drafter.head_rows, drafter.draft_to_target, (),
                           jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), None, 0.0, "sequential", None)


@pytest.mark.parametrize("N", [-1, 65])
def test_lengths_are_checked(N):
    with pytest.raises(ValueError, match=f"copy_length: {N}; must lie in \\[0, 64\\]"):
        pairs.random_drafter(pairs.random_target(), copy_length=N)
