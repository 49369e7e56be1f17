"""Candidates from the base logits and from the previous token's successors, against loops, the lattice and the scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
import pairs
import slow
from dspark_jax import drafter as drafter_lib
from dspark_jax import transitions, union
from dspark_jax.candidates import top_candidates
from dspark_jax.lattice import lattice_draft
from dspark_jax.sampling import probabilities
from dspark_jax.sequential import sequential_draft
from dspark_jax.transitions import TRANSITIONS
from golden import close

KEY = jax.random.key(0)
TABLED = [name for name in slow.FIRST_ORDER if name != "none"]


def draft_ids(V, Vd):
    return np.sort(np.random.default_rng(2).choice(V, Vd, replace=False)).astype(np.int32)


def slow_table(params, K):
    B = np.asarray(params["successor"], np.float64)
    return np.array([slow.top(B @ a, K) for a in np.asarray(params["predecessor"], np.float64)])


def slow_union(name, params, logits, hidden, anchor, M, K, ids=None):
    """Greedy, one step and one token after the other: tokens, candidates without repetition, their scores."""
    to_target = (lambda i: i) if ids is None else (lambda i: int(ids[i]))
    table, previous, tokens, lists, rows = slow_table(params, K), int(anchor), [], [], []
    for unary, h in zip(logits, hidden):
        candidates = slow.top(unary, M)
        candidates += [int(b) for b in table[previous] if b not in candidates]
        scores = slow.scores(name, params, unary, previous, h, None)[0][candidates]
        previous = to_target(candidates[int(np.argmax(scores))])
        tokens.append(previous)
        lists.append([to_target(c) for c in candidates])
        rows.append(scores)
    return tokens, lists, rows


def test_table():
    """More rows than are computed at a time, and a remainder; equal scores by smaller id."""
    params, *_ = slow.random_block("vanilla", V=2 * union.ROWS + 9, Vd=30, R=3)
    params["successor"][20:25] = params["successor"][3]
    for K in (1, 6, 30):
        table = union.successor_table(params, K)
        assert table.dtype == jnp.int32
        np.testing.assert_array_equal(table, slow_table(params, K))
    with pytest.raises(ValueError, match="M: got 31 candidates from a vocabulary of V = 30"):
        union.successor_table(params, 31)


def test_table_never_holds_all_scores():
    V = 16 * union.ROWS
    table = jax.ShapeDtypeStruct((V, 4), jnp.float32)
    params = {"predecessor": table, "successor": table}
    memory = union.successor_table.lower(params, 2).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * V * V / 4


def union_draft(transition, params, logits, hidden, anchor, key, temperature, M, successors, ids=None):
    best = top_candidates(logits, M)
    return union.union_among(transition, params, *best, hidden, anchor, key, temperature, logits, successors, ids)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", TABLED)
def test_against_numpy(name, mapped):
    V, Vd, T, M, K = 20, 14, 6, 3, 4
    params, logits, hidden, anchor = slow.random_block(name, seed=1, V=V, Vd=Vd if mapped else V, T=T, lead=(5,))
    ids = draft_ids(V, Vd) if mapped else None
    table = union.successor_table(params, K)

    def both(u, h, a):
        draw = lambda t: union_draft(TRANSITIONS[name], params, u, h, a, KEY, t, M, table, ids)
        return draw(0.0), draw(0.8)

    greedy, sampled = jax.jit(jax.vmap(both))(logits, hidden, anchor)
    beyond = 0
    for b in range(len(anchor)):
        tokens, lists, rows = slow_union(name, params, logits[b], hidden[b], anchor[b], M, K, ids)
        np.testing.assert_array_equal(greedy[0][b], tokens)
        for t in range(T):
            np.testing.assert_array_equal(greedy[1][b, t, :M], lists[t][:M])
            assert set(np.asarray(greedy[1][b, t]).tolist()) == set(lists[t])
            np.testing.assert_array_equal(greedy[2][b, t], np.arange(M + K) == int(np.argmax(greedy[2][b, t])))
            assert greedy[1][b, t, np.argmax(greedy[2][b, t])] == tokens[t]
            beyond += tokens[t] not in lists[t][:M]
    assert beyond > 0  # successors were needed

    for b in range(len(anchor)):  # sampled: q is the law over the distinct candidates of the path drawn
        previous = int(anchor[b])
        for t in range(T):
            base = slow.top(logits[b, t], M)
            distinct = base + [int(i) for i in slow_table(params, K)[previous] if i not in base]
            law = slow.softmax(slow.scores(name, params, logits[b, t], previous, hidden[b, t], None)[0][distinct] / 0.8)
            dense, got = np.zeros(V), np.zeros(V)
            np.add.at(dense, distinct if ids is None else ids[distinct], law)
            np.add.at(got, sampled[1][b, t], sampled[2][b, t])
            close(got, dense)
            previous = int(sampled[0][b, t])
            assert got[previous] > 0


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", TABLED)
def test_without_successors_it_is_the_lattice(name, mapped):
    V, Vd, T, M = 20, 14, 6, 4
    params, logits, hidden, anchor = slow.random_block(name, seed=3, V=V, Vd=Vd if mapped else V, T=T, lead=(8,))
    ids, table = draft_ids(V, Vd) if mapped else None, jnp.zeros((V, 0), jnp.int32)

    def both(u, h, a, k):
        lattice = lattice_draft(TRANSITIONS[name], params, u, h, a, k, 0.7, M, ids)
        return lattice, union_draft(TRANSITIONS[name], params, u, h, a, k, 0.7, M, table, ids)

    lattice, ours = jax.jit(jax.vmap(both))(logits, hidden, anchor, jax.random.split(KEY, 8))
    np.testing.assert_array_equal(ours[0], lattice[0])
    np.testing.assert_array_equal(ours[1], lattice[1])
    close(ours[2], lattice[2])


@pytest.mark.parametrize("M, K", [(12, 12), (1, 12), (12, 1)])
@pytest.mark.parametrize("name", TABLED)
def test_with_all_tokens_it_is_sequential(name, M, K):
    """Token for token when greedy; when sampling, the law along the path is the sequential one."""
    V, T = 12, 6
    params, logits, hidden, anchor = slow.random_block(name, seed=5, V=V, T=T, lead=(8,))
    transition, table = TRANSITIONS[name], union.successor_table(params, K)

    def all_of_it(u, h, a, k):
        expected, _, _ = sequential_draft(transition, params, u, h, a, k, 0.0)
        tokens, _, _ = union_draft(transition, params, u, h, a, k, 0.0, M, table)
        x, ids, q = union_draft(transition, params, u, h, a, k, 0.9, M, table)
        previous = jnp.concatenate([a[None], x[:-1]])
        law = probabilities(transitions.teacher_forced_logits(transition, params, u, previous, h), 0.9)
        return expected, tokens, jnp.zeros((T, V)).at[jnp.arange(T)[:, None], ids].add(q), law

    expected, tokens, q, law = jax.jit(jax.vmap(all_of_it))(logits, hidden, anchor, jax.random.split(KEY, 8))
    np.testing.assert_array_equal(tokens, expected)
    close(q, law)


def test_drafter_with_successors():
    """Decoding stays greedy decoding, and one base candidate with successors is better than one alone."""
    target = pairs.random_target(seed=4, vocab_size=16, tie_word_embeddings=False, head_spread=0.6, depth=0.4)
    for ids in (None, [0, 1, 3, 5, 6, 7, 8, 10, 12, 13, 15]):
        plain = pairs.random_drafter(target, transition="vanilla", rank=32, output_multiplier=0.3,
                                     draft_ids=None if ids is None else np.array(ids))
        e = np.asarray(target.embedding())
        plain.params["transition"] = {"predecessor": jnp.asarray(e / np.sqrt(np.mean(e**2, axis=-1, keepdims=True))),
                                      "successor": plain.head_rows}
        drafter = drafter_lib.with_successors(plain, 2)
        assert drafter.successors.shape == (16, 2) and drafter_lib.with_successors(drafter, 0).successors is None
        prompts, run = [[3, 5], [11]], dict(max_new_tokens=20, stop_tokens=[])
        expected = ds.generate(target, None, prompts, **run).tokens
        lengths = []
        for d in (plain, drafter):
            result = ds.generate(target, d, prompts, execution="lattice", candidates=1, **run)
            assert result.tokens == expected
            lengths.append(result.accepted_length)
        assert lengths[1] > lengths[0]


@pytest.mark.parametrize("transition, K, message", [
    ("vanilla", 49, "K: 49; must lie in \\[0, 48\\], the draft vocabulary"),
    ("vanilla", -1, "K: -1; must lie in"),
    ("none", 2, "transition: 'none' knows no successors of a token"),
    ("recurrent", 2, "'recurrent' depends on the whole path; use 'sequential'"),
])
def test_bad_input(transition, K, message):
    drafter = pairs.random_drafter(pairs.random_target(), transition=transition)
    with pytest.raises(ValueError, match=message):
        drafter_lib.with_successors(drafter, K)
