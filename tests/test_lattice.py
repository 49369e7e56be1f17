import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from dspark_jax import lattice, transitions
from dspark_jax.candidates import top_candidates
from dspark_jax.sampling import probabilities
from dspark_jax.sequential import sequential_draft
from dspark_jax.transitions import TRANSITIONS
from golden import close, load

KEY = jax.random.key(0)


def test_golden_selector():
    z = load("dflash/selector")
    params = {
        "predecessor": z["predecessor_codebook"],
        "successor": z["successor_codebook"],
        "hidden_projection": z["hidden_projection"].T,
    }
    M, transition = int(z["top_k"]), TRANSITIONS["context"]
    candidates, unary = jax.jit(lambda x: top_candidates(x, M))(z["logits"])
    np.testing.assert_array_equal(candidates, z["candidates"])
    np.testing.assert_array_equal(unary, z["unary"])
    np.testing.assert_array_equal(jnp.argmax(z["logits"], -1), z["unary_argmax"])

    score = jax.jit(jax.vmap(lambda u, c, h, a: lattice.pair_scores(transition, params, u, c, h, a)))
    first, pairs = score(unary, candidates, z["hidden"], z["anchor_ids"])
    close(first, z["scores_first"])
    close(pairs, z["scores_pair"])

    slots, _ = jax.jit(jax.vmap(lambda f, s: lattice.walk(f, s, KEY, 0.0)))(first, pairs)
    np.testing.assert_array_equal(slots, z["greedy_index"])
    draft = jax.vmap(lambda u, h, a: lattice.lattice_draft(transition, params, u, h, a, KEY, 0.0, M))
    tokens, ids, _ = jax.jit(draft)(z["logits"], z["hidden"], z["anchor_ids"])
    np.testing.assert_array_equal(tokens, z["greedy_path"])
    np.testing.assert_array_equal(ids, z["candidates"])

    # The reference's q rows follow the greedy path at a temperature of their own.
    along = np.take_along_axis(np.asarray(pairs), z["greedy_index"][:, :-1, None, None], axis=2)[:, :, 0]
    rows = np.concatenate([np.asarray(first)[:, None], along], axis=1)
    close(probabilities(rows, float(z["q_temperature"])), z["q_rows"])


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", slow.FIRST_ORDER)
def test_against_numpy(name, mapped):
    V, Vd, T, M = 20, 14, 6, 4
    params, logits, hidden, anchor = slow.random_block(name, seed=1, V=V, Vd=Vd if mapped else V, T=T)
    ids = np.sort(np.random.default_rng(2).choice(V, Vd, replace=False)).astype(np.int32) if mapped else None
    draft = jax.jit(lambda u, h, a: lattice.lattice_draft(TRANSITIONS[name], params, u, h, a, KEY, 0.0, M, ids))
    tokens, candidates, q = draft(logits, hidden, anchor)
    expected_tokens, expected_candidates, rows = slow.greedy_lattice(name, params, logits, hidden, anchor, M, ids)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_array_equal(candidates, expected_candidates)
    np.testing.assert_array_equal(q, np.eye(M)[rows.argmax(-1)])


@pytest.mark.parametrize("name", slow.FIRST_ORDER)
def test_scores_are_the_sequential_logits_at_the_candidates(name):
    T, M = 5, 4
    params, logits, hidden, anchor = slow.random_block(name, seed=3, T=T)
    transition = TRANSITIONS[name]
    candidates, unary = top_candidates(logits, M)
    first, pairs = jax.jit(lambda *x: lattice.pair_scores(transition, params, *x))(unary, candidates, hidden, anchor)
    forced = jax.jit(lambda prev: transitions.teacher_forced_logits(transition, params, logits, prev, hidden))
    close(first, forced(jnp.full(T, anchor))[0][candidates[0]])
    for i in range(M):
        previous = jnp.concatenate([anchor[None], candidates[:-1, i]])
        close(pairs[:, i], np.take_along_axis(np.asarray(forced(previous))[1:], np.asarray(candidates)[1:], axis=-1))


def test_scores_from_16_bit_tables_are_summed_in_float32():
    """Published drafters are kept in bfloat16: both executions must still read the same scores.

    Of a vanilla transition: a gate is a 16-bit product of its own, rounded where it is computed.
    """
    name, T, M = "vanilla", 5, 4
    params, logits, hidden, anchor = slow.random_block(name, seed=8, T=T)
    params = {key: value.astype(jnp.bfloat16) for key, value in params.items()}
    hidden = hidden.astype(jnp.bfloat16)
    transition = TRANSITIONS[name]
    candidates, unary = top_candidates(logits, M)
    first, pairs = lattice.pair_scores(transition, params, unary, candidates, hidden, anchor)
    forced = lambda prev: transitions.teacher_forced_logits(transition, params, logits, prev, hidden)
    close(first, forced(jnp.full(T, anchor))[0][candidates[0]])
    for i in range(M):
        previous = jnp.concatenate([anchor[None], candidates[:-1, i]])
        close(pairs[:, i], np.take_along_axis(np.asarray(forced(previous))[1:], np.asarray(candidates)[1:], axis=-1))


def compare_with_sequential(name, temperature, seed, mapped):
    """Lattice of all tokens in order of id against sequential drafting with the same key."""
    V, T = 12, 6
    Vd = 8 if mapped else V
    params, logits, hidden, anchor = slow.random_block(name, seed=seed, V=V, Vd=Vd, T=T, lead=(16,))
    ids = np.sort(np.random.default_rng(0).choice(V, Vd, replace=False)).astype(np.int32) if mapped else None
    keys, transition, everything = jax.random.split(jax.random.key(seed), 16), TRANSITIONS[name], jnp.arange(Vd)

    def both(u, h, a, k):
        expected, q, _ = sequential_draft(transition, params, u, h, a, k, temperature, ids)
        scores = lattice.pair_scores(transition, params, u, jnp.broadcast_to(everything, u.shape), h, a, ids)
        slots, rows = lattice.walk(*scores, k, temperature)
        tokens = slots if ids is None else jnp.asarray(ids)[slots]
        return tokens, expected, rows, q

    tokens, expected, rows, q = jax.jit(jax.vmap(both))(logits, hidden, anchor, keys)
    np.testing.assert_array_equal(tokens, expected)
    close(rows, q)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", slow.FIRST_ORDER)
def test_all_candidates_is_sequential_when_sampling(name, mapped):
    """The same uniforms on the same laws give the same tokens."""
    compare_with_sequential(name, 0.9, 4, mapped)


@pytest.mark.parametrize("name", slow.FIRST_ORDER)
def test_all_candidates_is_sequential_when_greedy(name):
    V = 12
    params, logits, hidden, anchor = slow.random_block(name, seed=5, V=V, T=6, lead=(16,))
    transition = TRANSITIONS[name]

    def both(u, h, a):
        expected, q, _ = sequential_draft(transition, params, u, h, a, KEY, 0.0)
        tokens, ids, rows = lattice.lattice_draft(transition, params, u, h, a, KEY, 0.0, V)
        return tokens, expected, jnp.zeros_like(q).at[jnp.arange(6)[:, None], ids].set(rows), q

    tokens, expected, rows, q = jax.jit(jax.vmap(both))(logits, hidden, anchor)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(rows, q)


@pytest.mark.parametrize("name", slow.FIRST_ORDER)
def test_sampled_laws_of_the_lattice_are_the_sequential_ones(name):
    """M = V, candidates sorted by score: along the path drawn, q is the sequential law of the same path."""
    V, T, temperature = 12, 6, 0.7
    params, logits, hidden, anchor = slow.random_block(name, seed=6, V=V, T=T)
    transition = TRANSITIONS[name]
    tokens, ids, q = lattice.lattice_draft(transition, params, logits, hidden, anchor, KEY, temperature, V)
    previous = jnp.concatenate([anchor[None], tokens[:-1]])
    expected = probabilities(transitions.teacher_forced_logits(transition, params, logits, previous, hidden), temperature)
    close(np.take_along_axis(np.asarray(expected), np.asarray(ids), axis=-1), q)


def test_walk_against_all_paths():
    """Every path of a small lattice, its probability by multiplication: 100,000 walks must follow that law."""
    T, M, temperature, n = 3, 3, 0.8, 100_000
    rng = np.random.default_rng(0)
    first, pairs = rng.normal(size=M).astype(np.float32), rng.normal(size=(T - 1, M, M)).astype(np.float32)
    walk = jax.jit(jax.vmap(lambda k: lattice.walk(first, pairs, k, temperature)))
    slots, q = map(np.asarray, walk(jax.random.split(KEY, n)))
    counts = np.zeros((M,) * T)
    np.add.at(counts, tuple(slots.T), 1)
    for path in itertools.product(range(M), repeat=T):
        rows = [first] + [pairs[t - 1, path[t - 1]] for t in range(1, T)]
        laws = [slow.softmax(row.astype(np.float64) / temperature) for row in rows]
        p = np.prod([law[slot] for law, slot in zip(laws, path)])
        assert abs(counts[path] - n * p) < 5 * np.sqrt(n * p), path
        visited = (slots == path).all(-1)
        close(q[visited], np.broadcast_to(laws, (visited.sum(), T, M)))


def test_greedy_walk_takes_the_first_of_equal_slots():
    slots, q = lattice.walk(jnp.array([1.0, 3.0, 3.0]), jnp.zeros((2, 3, 3)), KEY, 0.0)
    np.testing.assert_array_equal(slots, [1, 0, 0])
    np.testing.assert_array_equal(q, np.eye(3)[[1, 0, 0]])


def test_one_position():
    params, logits, hidden, anchor = slow.random_block("context", T=1)
    tokens, candidates, q = lattice.lattice_draft(TRANSITIONS["context"], params, logits, hidden, anchor, KEY, 0.0, 20)
    assert tokens.shape == (1,) and candidates.shape == q.shape == (1, 20)
    np.testing.assert_array_equal(tokens, slow.greedy_sequential("context", params, logits, hidden, anchor)[0])


def test_recurrent_says_why_not():
    params, logits, hidden, anchor = slow.random_block("recurrent")
    with pytest.raises(ValueError, match="'recurrent' can't be scored on a lattice, because its phi depends on all tokens"):
        lattice.lattice_draft(TRANSITIONS["recurrent"], params, logits, hidden, anchor, KEY, 0.0, 3)


def test_too_many_candidates():
    params, logits, hidden, anchor = slow.random_block("vanilla")
    with pytest.raises(ValueError, match="M: got 21 candidates from a vocabulary of V = 20"):
        lattice.lattice_draft(TRANSITIONS["vanilla"], params, logits, hidden, anchor, KEY, 0.0, 21)


def test_pairs_are_one_batched_product():
    """Two nested vmaps over one `edge` become a single [T-1, M, R] x [T-1, M, R] product, not a loop."""
    T, M, R = 5, 4, 7
    params, logits, hidden, anchor = slow.random_block("vanilla", T=T, R=R)
    candidates, unary = top_candidates(logits, M)
    score = lambda *x: lattice.pair_scores(TRANSITIONS["vanilla"], params, *x)
    eqns = jax.make_jaxpr(score)(unary, candidates, hidden, anchor).eqns
    products = [e for e in eqns if e.primitive.name == "dot_general"]
    shapes = {frozenset(v.aval.shape for v in e.invars) for e in products}
    assert shapes == {frozenset({(T - 1, M, R)}), frozenset({(M, R), (R,)})}
    assert not {"scan", "while"} & {e.primitive.name for e in eqns}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about what XLA does on CPU")
def test_the_vocabulary_is_not_sorted():
    """A top-k that shares a jit with the scores and the walk must not turn into a sort: 200 times slower on CPU."""
    V, M = 20_000, 16
    params, logits, hidden, anchor = slow.random_block("context", V=V, D=8, R=8, T=3, lead=(2,))
    draft = jax.vmap(lambda u, h, a, k: lattice.lattice_draft(TRANSITIONS["context"], params, u, h, a, k, 1.0, M))
    program = jax.jit(draft).lower(logits, hidden, anchor, jax.random.split(KEY, 2)).compile().as_text()
    sorted_widths = [int(s.split(",")[-1]) for s in re.findall(r"\w+\[([\d,]+)\]\S* sort\(", program)]
    sorted_widths += [int(s.split(",")[-1]) for s in re.findall(r"= \(\w+\[([\d,]+)\][^=]* sort\(", program)]
    assert all(width <= M for width in sorted_widths), sorted_widths
    assert program.count('"TopK"') == 2
