import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from dspark_jax import verification
from dspark_jax.lattice import lattice_draft
from dspark_jax.sampling import draw, probabilities
from dspark_jax.sequential import sequential_draft
from dspark_jax.transitions import TRANSITIONS
from dspark_jax.verification import SparseDraft
from golden import close, load
from test_laws import chi_square


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
    """Also where an id is repeated with probability 0."""
    q = SparseDraft(jnp.array([[3, 0, 3], [1, 2, 4]]), jnp.array([[0.0, 0.5, 0.5], [0.1, 0.2, 0.7]]))
    dense = jnp.array([[0.5, 0, 0, 0.5, 0], [0, 0.1, 0.2, 0, 0.7]])
    for t in (0, 1):
        close(verification.full_row(q, t, 5), dense[t])
        close(verification.full_row(dense, t, 5), dense[t])
    p, weights = jnp.full((2, 5), 0.2), jnp.array([1.0, 0.5])
    close(verification.overlap(p, q, weights), [0.4, 0.3])
    close(verification.overlap(p, dense, weights), [0.4, 0.3])
    for tokens in ([3, 4], [0, 1], [1, 0]):
        tokens = jnp.array(tokens)
        close(verification.token_probabilities(q, tokens), verification.token_probabilities(dense, tokens))


@pytest.mark.parametrize("rule", verification.VERIFICATION)
def test_greedy_laws_accept_exactly_the_matching_prefix(rule):
    p = jnp.eye(6)[jnp.array([4, 2, 0, 5])]
    verify = jax.jit(verification.get_verification(rule))
    for tokens, accepted, following in (([4, 2, 0], 3, 5), ([4, 2, 1], 2, 0), ([0, 2, 0], 0, 4)):
        tokens = jnp.array(tokens)
        q = SparseDraft(jnp.stack([tokens, tokens + 1], -1), jnp.array([[1.0, 0.0]] * 3))
        for seed in range(5):
            result = verify(jax.random.key(seed), p, tokens, q)
            assert tuple(map(int, result)) == (accepted, following)
    assert tuple(map(int, verify(jax.random.key(0), p, tokens, q, 0))) == (0, 4)


def test_block_rule_by_hand():
    """Weights, chances and the prefix kept, with numbers worked out on paper."""
    close(verification.prefix_weights(jnp.array([0.2, 0.6, 0.3]), jnp.array([0.4, 0.4, 0.2])), [1, 0.5, 0.75, 1])
    # A token that the target never says ends it, also one that the drafter would not draw; 0.1 / 0 counts as certain.
    close(verification.prefix_weights(jnp.array([0.0, 0.6, 0.3]), jnp.array([0.4, 0.4, 0.0])), [1, 0, 0, 0])
    close(verification.prefix_weights(jnp.array([0.1, 0.0, 0.3]), jnp.array([0.0, 0.0, 0.2])), [1, 1, 0, 0])

    p = jnp.array([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    q = jnp.array([[0.4, 0.6], [0.2, 0.8]])
    weights = verification.prefix_weights(jnp.array([0.2, 0.6]), jnp.array([0.4, 0.2]))  # drafts 0, 0
    close(weights, [1, 0.5, 1])
    chances = verification.prefix_chances(p, q, weights)
    close(chances, [1, 0.1 / (0.1 + 0.5), 1])  # S_1 = relu(0.3 - 0.2) + relu(0.2 - 0.8)
    close(verification.prefix_chances(p, q, weights, 1), [1, 0.5, 0])
    close(verification.prefix_chances(p, q, weights, 0), [1, 0, 0])
    close(verification.prefix_chances(p, p[:-1], jnp.ones(3)), [1, 1, 1])

    drafts = jnp.array([0, 0])
    accept = jax.jit(verification.accept_block)
    keep = lambda u, n=None: tuple(map(float, accept(jnp.array(u), p, drafts, q, n)))
    assert keep([0.9, 0.99]) == (2, 1)  # the first draft alone would have been refused: the block is judged as a whole
    assert keep([0.49, 0.0], 1) == (1, 0.5) and keep([0.5, 0.0], 1) == (0, 1) and keep([0.0, 0.0], 0) == (0, 1)
    p = p.at[1].set(jnp.array([0.0, 1.0]))
    assert keep([0.9, 0.0]) == (0, 1)
    assert keep([0.7, 0.0]) == (0, 1)  # S_1 = relu(0 - 0.2) + relu(0.5 - 0.8): nothing


def test_table():
    assert verification.get_verification("token") is verification.verify_tokens
    assert verification.get_verification("block") is verification.verify_block
    with pytest.raises(ValueError, match="verification: unknown name 'tree'; allowed: token, block"):
        verification.get_verification("tree")


# The law of what comes out, without sampling: every path of drafts, and the uniforms integrated exactly.

CASES = 200  # random pairs of target and drafter
AGREEING = 20  # of which so many have one law in common


@functools.cache
def random_laws(V, T):
    """Laws after every prefix, zeros included: target [C, V, ...] with 0..T tokens before, drafter with 0..T-1."""
    rng = np.random.default_rng(V + T)

    def laws(t, zeros):
        x = rng.normal(size=(CASES, *[V] * (t + 1))) * np.linspace(0.1, 2.5, CASES).reshape(-1, *[1] * (t + 1))
        p = np.exp(x) * (rng.random(x.shape) >= zeros)
        p[..., 0] += p.sum(-1) == 0
        return p / p.sum(-1, keepdims=True)

    target = [laws(t, 0.15) for t in range(T + 1)]
    drafter = [laws(t, 0.3) for t in range(T)]
    drafter[-1][:AGREEING] = target[-2][:AGREEING]
    return target, drafter


def along(laws, paths):
    """Rows of the laws along each path: [C, paths, len(laws), V]."""
    return np.stack([law[:, *paths.T[:t]] if t else np.repeat(law[:, None], len(paths), 1)
                     for t, law in enumerate(laws)], axis=2)


def as_sparse(q):
    """[..., V] as a `SparseDraft` of V + 1 candidates: ids in another order, the first repeated with probability 0."""
    ids = np.argsort(-q, axis=-1, kind="stable")
    ids = np.concatenate([ids, ids[..., :1]], axis=-1)
    probabilities = np.take_along_axis(q, ids, axis=-1)
    probabilities[..., -1] = 0
    return SparseDraft(ids, probabilities)


def chances(rule, p, tokens, q, proposed):
    """The u_i below which a rule's decision about draft i is yes: [T]."""
    p_tokens = jnp.take_along_axis(p[:-1], tokens[:, None], -1)[:, 0]
    q_tokens = verification.token_probabilities(q, tokens)
    if rule == "token":
        return jnp.minimum(1, p_tokens / jnp.where(q_tokens > 0, q_tokens, 1))
    return verification.prefix_chances(p, q, verification.prefix_weights(p_tokens, q_tokens), proposed)[1:]


@functools.cache
def outcomes(rule, T):
    """Compiled: (uniforms on both sides of the chances) -> measure, accepted, law of the next token, per cell [2^T]."""
    accept = {"token": verification.accept_tokens, "block": verification.accept_block}[rule]
    sides = jnp.array(list(itertools.product((0, 1), repeat=T)))

    def cells(p, tokens, q, proposed):
        below = chances(rule, p, tokens, q, proposed)
        uniforms = jnp.where(sides == 0, below / 2, (1 + below) / 2)
        measure = jnp.prod(jnp.where(sides == 0, below, 1 - below), axis=-1)
        accepted, weight = jax.vmap(lambda u: accept(u, p, tokens, q, proposed))(uniforms)
        weight = jnp.broadcast_to(weight, accepted.shape)
        following = jax.vmap(lambda a, w: verification.next_distribution(p, q, a, proposed, w))(accepted, weight)
        return measure, accepted, following

    over_paths = jax.vmap(cells, in_axes=(0, 0, 0, 0))
    return jax.jit(jax.vmap(over_paths, in_axes=(0, None, 0, 0)))


@functools.cache
def exact(rule, form, V, T, proposed):
    """Joint law of T + 1 tokens, [C, V, ..., V], and expected accepted length [C].

    One round, completed from the target where it is shorter. proposed: a number, or "stopping": how many drafts are put
    to verification depends on the drafts, as it does with a confidence threshold.
    """
    target, drafter = random_laws(V, T)
    paths = np.array(list(itertools.product(range(V), repeat=T)))
    q = along(drafter, paths)
    chance = np.take_along_axis(q, paths[None, :, :, None], -1)[..., 0].prod(-1)  # that the path is drafted
    if proposed == "stopping":
        stop = [np.random.default_rng(t).random((CASES, *[V] * t)) < 0.3 for t in range(T)]
        stopped = np.stack([s[:, *paths.T[:t]] if t else np.repeat(s[:, None], len(paths), 1)
                            for t, s in enumerate(stop)], axis=2)
        n = np.cumprod(~stopped, axis=-1).sum(-1)
    else:
        n = np.full(chance.shape, proposed)
    with jax.enable_x64(True):
        q = as_sparse(q) if form == "sparse" else q
        measure, accepted, following = map(np.asarray, outcomes(rule, T)(along(target, paths), paths, q, n))
    assert following.dtype == np.float64 and np.isfinite(following).all()
    weight = chance[..., None] * measure
    joint = np.zeros((CASES, *[V] * (T + 1)))
    for m in range(T + 1):
        start = np.zeros((CASES, V**m, V))  # m drafts and the token after them
        mass = np.where(accepted == m, weight, 0)[..., None] * following
        np.add.at(start, (slice(None), np.arange(len(paths)) // V**(T - m)), mass.sum(2))
        start = start.reshape(CASES, *[V] * (m + 1))
        for t in range(m + 1, T + 1):
            start = start[..., None] * target[t]
        joint += start
    return joint, (weight * accepted).sum((1, 2))


SIZES = [(4, 1), (4, 2), (3, 3)]


@pytest.mark.parametrize("V, T", SIZES)
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("rule", verification.VERIFICATION)
def test_output_law_is_exactly_the_targets(rule, form, V, T):
    law, *continuations = random_laws(V, T)[0]
    for continuation in continuations:
        law = law[..., None] * continuation
    for proposed in (*range(T + 1), "stopping"):
        joint, length = exact(rule, form, V, T, proposed)
        np.testing.assert_allclose(joint, law, rtol=0, atol=1e-13)
        assert (joint[law == 0] == 0).all()
        if proposed == 0:
            assert (length == 0).all()


@pytest.mark.parametrize("V, T", SIZES)
def test_block_rule_keeps_more(V, T):
    for proposed in (*range(T + 1), "stopping"):
        lengths = {rule: exact(rule, "dense", V, T, proposed)[1] for rule in ("token", "block")}
        gain = lengths["block"] - lengths["token"]
        assert (gain > -1e-13).all()
        if proposed in (0, 1) or T == 1:
            np.testing.assert_allclose(gain, 0, atol=1e-13)  # of a single draft there is only one way to judge
        elif proposed == T:
            assert (gain[AGREEING:] > 1e-6).mean() > 0.75


def test_the_exact_test_can_fail():
    """A block rule that judges every prefix as if it were the last, and one that forgets the weight in the residual."""
    law = functools.reduce(lambda p, after: p[..., None] * after, random_laws(4, 2)[0])
    forgetful = verification.next_distribution
    wrong = {
        "prefix_chances": lambda p, q, weights, n=None: weights,
        "next_distribution": lambda p, q, accepted, n=None, weight=1.0: forgetful(p, q, accepted, n),
    }
    for name, function in wrong.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, name, function)
            outcomes.cache_clear()
            joint, _ = exact.__wrapped__("block", "dense", 4, 2, 2)
        outcomes.cache_clear()
        assert np.abs(joint - law).max() > 1e-3


# The same with the drafts of real heads, float32 and random numbers: two drafts and one more token.
T, V, SAMPLES = 2, 6, 30_000


def target_laws(temperature, top_p):
    """p(x_0), p(x_1 | x_0), p(x_2 | x_0 x_1) of a random target: arrays [V], [V, V], [V, V, V]."""
    rng = np.random.default_rng(0)
    shapes = [(V,) * (t + 1) for t in range(T + 1)]
    logits = [jnp.asarray(rng.normal(size=s) * 1.5, jnp.float32) for s in shapes]
    return [probabilities(x, temperature, top_p=top_p) for x in logits]


def verified_tokens(rule, draft, temperature, top_p, key):
    """Three tokens: what one round gives, completed from the target where the round is shorter."""
    p0, p1, p2 = target_laws(temperature, top_p)
    draft_key, verify_key, *rest = jax.random.split(key, 2 + T)
    x, q = draft(draft_key, temperature)
    p = jnp.stack([p0, p1[x[0]], p2[x[0], x[1]]])
    accepted, following = verification.get_verification(rule)(verify_key, p, x, q)
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


@pytest.mark.parametrize("rule", verification.VERIFICATION)
@pytest.mark.parametrize("draft", [dense_draft, sparse_draft, small_vocabulary_draft])
def test_sampled_output_law(draft, rule):
    temperature, top_p = 0.8, 0.9
    sample = jax.jit(jax.vmap(lambda k: verified_tokens(rule, draft, temperature, top_p, k)))
    out, accepted = map(np.asarray, sample(jax.random.split(jax.random.key(7), SAMPLES)))
    counts = np.zeros((V,) * (T + 1))
    np.add.at(counts, tuple(out.T), 1)
    p0, p1, p2 = (np.asarray(x, np.float64) for x in target_laws(temperature, top_p))
    law = p0[:, None, None] * p1[:, :, None] * p2
    assert chi_square(counts, law) > 1e-3
    assert 0.1 < accepted.mean() < T - 0.1  # the test would be empty if nothing, or everything, were accepted
