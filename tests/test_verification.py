import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import slow
from dspark_jax import verification
from dspark_jax.lattice import lattice_draft
from dspark_jax.sampling import draw, probabilities
from dspark_jax.sequential import sequential_draft
from dspark_jax.transitions import TRANSITIONS
from dspark_jax.verification import SparseDraft
from golden import close, load


def problem(name):
    """p [L+1, V], draft tokens [L], draft laws, of one of the three problems in rejection.npz."""
    z = load("dflash/rejection")
    prefix = {"sparse": "", "filtered": "filtered_", "dense": "dense_"}[name]
    p, tokens, probs = (jnp.asarray(z[f"{prefix}{k}"]) for k in ("target_probs", "draft_tokens", "draft_probs"))
    q = probs if name == "dense" else SparseDraft(jnp.asarray(z[f"{prefix}draft_ids"]), probs)
    return z, p, tokens, q


@pytest.mark.parametrize("name", ["sparse", "filtered", "dense"])
def test_golden(name):
    z, p, tokens, q = problem(name)
    L, V = p.shape[0] - 1, p.shape[1]
    q_token = verification.token_probabilities(q, tokens)
    p_token = p[np.arange(L), tokens]
    close(q_token, z[f"{name}_q_token"])
    close(p_token, z[f"{name}_p_token"])
    close(np.minimum(1, p_token / q_token), z[f"{name}_accept_prob"])

    rows = np.stack([verification.full_row(q, t, V) for t in range(L)])
    close(np.maximum(p[:-1] - rows, 0).sum(-1), z[f"{name}_residual_mass"])
    close(jax.vmap(verification.residual)(p[:-1], rows), z[f"{name}_residual"])

    uniforms = z[f"{name}_uniforms"]
    accepted = jax.vmap(lambda u: verification.accepted_length(u, p_token, q_token))(uniforms)
    np.testing.assert_array_equal(accepted, z[f"{name}_uniforms_accepted"])
    following = jax.vmap(lambda a: verification.next_distribution(p, q, a))(accepted)
    close(following, z[f"{name}_uniforms_next_dist"])


@pytest.mark.parametrize("name", ["sparse", "filtered", "dense"])
def test_golden_with_fewer_drafts_proposed(name):
    """With only n of the drafts put to verification: never more than n accepted, and then the target's own law."""
    z, p, tokens, q = problem(name)
    q_token, p_token = z[f"{name}_q_token"], z[f"{name}_p_token"]
    accept = jax.jit(lambda u, n: verification.accepted_length(u, p_token, q_token, n))
    following = jax.jit(lambda a, n: verification.next_distribution(p, q, a, n))
    for n in range(len(tokens) + 1):
        for u, full, law in zip(*(z[f"{name}_uniforms{k}"] for k in ("", "_accepted", "_next_dist"))):
            accepted = accept(u, n)
            assert accepted == min(n, full)
            close(following(accepted, n), p[n] if full >= n else law)


def test_acceptance_by_hand():
    one = lambda u, p, q, n=None: int(verification.accepted_length(*map(jnp.array, (u, p, q)), n))
    assert one([0.5, 0.5], [0.2, 0.2], [0.3, 0.5]) == 1  # .15 < .2, then .25 >= .2
    assert one([0.5, 0.5], [0.25, 0.2], [0.5, 0.1]) == 0  # equality rejects
    assert one([0.0, 0.0], [0.0, 1.0], [0.5, 0.5]) == 0  # so does p = 0, even at u = 0
    assert one([0.9, 0.0, 0.9], [1.0, 0.0, 1.0], [1.0, 0.1, 1.0]) == 1  # nothing counts behind a rejection
    assert one([0.0] * 3, [1.0] * 3, [1.0] * 3, 2) == 2 and one([0.0], [1.0], [1.0], 0) == 0


def test_residual_by_hand():
    close(verification.residual(jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.5, 0.3])), [1, 0, 0])
    close(verification.residual(jnp.array([0.5, 0.4, 0.1, 0]), jnp.array([0.2, 0.2, 0.1, 0.5])), [0.6, 0.4, 0, 0])
    p = jnp.array([0.25, 0.75])
    np.testing.assert_array_equal(verification.residual(p, p), p)


def test_sparse_and_dense_are_the_same_law():
    """Repeated ids add up."""
    q = SparseDraft(jnp.array([[3, 0, 3], [1, 2, 4]]), jnp.array([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]))
    dense = jnp.array([[0.5, 0, 0, 0.5, 0], [0, 0.1, 0.2, 0, 0.7]])
    for t in (0, 1):
        close(verification.full_row(q, t, 5), dense[t])
        close(verification.full_row(dense, t, 5), dense[t])
    for tokens in ([3, 4], [0, 1], [1, 0]):
        tokens = jnp.array(tokens)
        close(verification.token_probabilities(q, tokens), verification.token_probabilities(dense, tokens))


def test_greedy_laws_accept_exactly_the_matching_prefix():
    p = jnp.eye(6)[jnp.array([4, 2, 0, 5])]
    for tokens, accepted, following in (([4, 2, 0], 3, 5), ([4, 2, 1], 2, 0), ([0, 2, 0], 0, 4)):
        tokens = jnp.array(tokens)
        q = SparseDraft(jnp.stack([tokens, tokens + 1], -1), jnp.array([[1.0, 0.0]] * 3))
        for seed in range(5):
            result = verification.verify_tokens(jax.random.key(seed), p, tokens, q)
            assert tuple(map(int, result)) == (accepted, following)


def test_table():
    assert verification.get_verification("token") is verification.verify_tokens
    with pytest.raises(ValueError, match="verification: unknown name 'tree'; allowed: token"):
        verification.get_verification("tree")


# The law of the output: two drafts and one more token, from a target whose law depends on the whole prefix.
T, V, SAMPLES = 2, 6, 120_000


def target_laws(temperature, top_p):
    """p(x_0), p(x_1 | x_0), p(x_2 | x_0 x_1) of a random target: arrays [V], [V, V], [V, V, V]."""
    rng = np.random.default_rng(0)
    shapes = [(V,) * (t + 1) for t in range(T + 1)]
    logits = [jnp.asarray(rng.normal(size=s) * 1.5, jnp.float32) for s in shapes]
    return [probabilities(x, temperature, top_p=top_p) for x in logits]


def verified_tokens(draft, temperature, top_p, proposed, key):
    """Three tokens: what one round gives, completed from the target where the round is shorter."""
    p0, p1, p2 = target_laws(temperature, top_p)
    draft_key, verify_key, *rest = jax.random.split(key, 2 + T)
    x, q = draft(draft_key, temperature)
    p = jnp.stack([p0, p1[x[0]], p2[x[0], x[1]]])
    accepted, following = verification.VERIFICATION["token"](verify_key, p, x, q, proposed)
    out = [jnp.where(accepted == 0, following, x[0])]
    out.append(jnp.where(accepted == 0, draw(rest[0], p1[out[0]]), jnp.where(accepted == 1, following, x[1])))
    out.append(jnp.where(accepted == 2, following, draw(rest[1], p2[out[0], out[1]])))
    return jnp.stack(out), accepted


def dense_draft(key, temperature):
    params, logits, hidden, anchor = slow.random_block("recurrent", V=V, T=T, seed=1)
    return sequential_draft(TRANSITIONS["recurrent"], params, logits, hidden, anchor, key, temperature)[:2]


def sparse_draft(key, temperature):
    params, logits, hidden, anchor = slow.random_block("context", V=V, T=T, seed=1)
    x, ids, q = lattice_draft(TRANSITIONS["context"], params, logits, hidden, anchor, key, temperature, 3)
    return x, SparseDraft(ids, q)


def small_vocabulary_draft(key, temperature):
    ids = jnp.array([0, 2, 3, 5])
    params, logits, hidden, anchor = slow.random_block("joint", V=V, Vd=4, T=T, seed=1)
    x, q, _ = sequential_draft(TRANSITIONS["joint"], params, logits, hidden, anchor, key, temperature, ids)
    return x, SparseDraft(jnp.broadcast_to(ids, q.shape), q)


def chi_square(observed, expected):
    """p-value, with the cells that are too rare for the test taken together."""
    rare = expected < 8
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    possible = expected > 0
    return scipy.stats.chisquare(observed[possible], expected[possible]).pvalue


CASES = [(d, p, None) for d in (dense_draft, sparse_draft, small_vocabulary_draft) for p in (1.0, 0.8)]


@pytest.mark.parametrize("draft, top_p, proposed", [*CASES, (dense_draft, 1.0, 1), (sparse_draft, 0.8, 1)])
def test_output_law_is_the_targets(draft, top_p, proposed):
    sample = jax.jit(jax.vmap(lambda t, k: verified_tokens(draft, t, top_p, proposed, k), in_axes=(None, 0)))
    for temperature in (0.5, 1.0, 1.5):
        out, accepted = map(np.asarray, sample(temperature, jax.random.split(jax.random.key(7), SAMPLES)))
        counts = np.zeros((V,) * (T + 1))
        np.add.at(counts, tuple(out.T), 1)
        p0, p1, p2 = (np.asarray(x, np.float64) for x in target_laws(temperature, top_p))
        law = p0[:, None, None] * p1[:, :, None] * p2
        assert counts[law == 0].sum() == 0
        expected = SAMPLES * law / law.sum()
        pvalue = chi_square(counts, expected)
        assert pvalue > 1e-3, (temperature, pvalue)
        assert 0 < accepted.mean() < (proposed or T)  # the test would be empty if nothing, or everything, were accepted
