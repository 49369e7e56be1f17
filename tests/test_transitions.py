import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import slow
from dspark_jax import confidence, transitions
from dspark_jax.sequential import sequential_draft
from dspark_jax.transitions import TRANSITIONS
from golden import close, load

HEADS = {"vanilla": "vanilla", "gated": "joint", "rnn": "recurrent"}
# Names in the reference's state dict -> (our name, whether it is stored transposed).
NAMES = {
    "markov_w1.weight": ("predecessor", False),
    "markov_w2.weight": ("successor", False),
    "gate_proj.weight": ("gate_kernel", True),
    "gate_proj.bias": ("gate_bias", False),
    "joint_proj.weight": ("joint_kernel", True),
    "joint_proj.bias": ("joint_bias", False),
}


def head(z, kind):
    """Parameters under our names, and the same for their gradients, from the arrays of heads.npz."""
    rename = lambda prefix: {
        ours: z[f"{kind}.{prefix}.{theirs}"].T if transpose else z[f"{kind}.{prefix}.{theirs}"]
        for theirs, (ours, transpose) in NAMES.items()
        if f"{kind}.{prefix}.{theirs}" in z
    }
    return rename("weight"), rename("grad")


@pytest.mark.parametrize("kind", HEADS)
def test_golden_drafting(kind):
    z = load("dspark/heads")
    params, _ = head(z, kind)
    draft = lambda u, h, a: sequential_draft(TRANSITIONS[HEADS[kind]], params, u, h, a, jax.random.key(0), 0.0)
    tokens, q, corrected = jax.jit(jax.vmap(draft))(z["base_logits"], z["hidden"], z["first_prev"])
    np.testing.assert_array_equal(tokens, z[f"{kind}.sampled_tokens"])
    close(corrected, z[f"{kind}.corrected_logits"])
    np.testing.assert_array_equal(q, jax.nn.one_hot(tokens, q.shape[-1]))


@pytest.mark.parametrize("kind", HEADS)
def test_golden_teacher_forcing_and_gradients(kind):
    z = load("dspark/heads")
    params, grads = head(z, kind)
    transition = TRANSITIONS[HEADS[kind]]

    def loss(params, hidden):
        logits = transitions.teacher_forced_logits(transition, params, z["tf_base_logits"], z["tf_prev"], hidden)
        labels = (z["tf_prev"] + 1) % logits.shape[-1]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return nll.mean(), logits

    (value, logits), (dparams, dhidden) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, z["tf_hidden"])
    close(logits, z[f"{kind}.tf_block_logits"])
    close(value, z[f"{kind}.grad_loss"])
    assert dparams.keys() == grads.keys()
    for name in grads:
        close(dparams[name], grads[name], message=name)
    close(dhidden, z[f"{kind}.grad_hidden"])


@pytest.mark.parametrize("kind", HEADS)
def test_golden_single_step(kind):
    z = load("dspark/heads")
    params, _ = head(z, kind)
    transition = TRANSITIONS[HEADS[kind]]
    embedding = transitions.embed(params, z["first_prev"])
    hidden = z["hidden"][:, 0]
    phi, _ = transition.phi(params, embedding, hidden, transitions.initial_state(embedding, hidden))
    close(transitions.bias(params, phi), z[f"{kind}.step_bias"])
    close(z["base_logits"][:, 0] + transitions.bias(params, phi), z[f"{kind}.step_logits"])


@pytest.mark.parametrize("case", ["no_markov", "with_markov"])
def test_golden_confidence(case):
    z = load("dspark/confidence")
    embedding = transitions.embed({"predecessor": z["markov_w1.weight"]}, z["prev"]) if case == "with_markov" else None
    kernel, bias = z[f"{case}.proj.weight"][0], z[f"{case}.proj.bias"][0]
    logits = confidence.confidence_logits(kernel, bias, z["hidden"], embedding)
    close(logits, z[f"{case}.logits"])
    close(jax.nn.sigmoid(logits), z[f"{case}.probs"])


def test_confidence_rejects_a_kernel_of_another_width():
    with pytest.raises(ValueError, match=r"kernel: shape \(4,\).*hidden 3, embedding none"):
        confidence.confidence_logits(np.zeros(4), 0.0, np.zeros((2, 3)))


@pytest.mark.parametrize("name", TRANSITIONS)
def test_against_numpy(name):
    params, logits, hidden, anchor = slow.random_block(name)
    tokens, _, corrected = sequential_draft(TRANSITIONS[name], params, logits, hidden, anchor, jax.random.key(0), 0.0)
    expected_tokens, expected = slow.greedy_sequential(name, params, logits, hidden, anchor)
    np.testing.assert_array_equal(tokens, expected_tokens)
    close(corrected, expected)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_smaller_draft_vocabulary(name):
    V, Vd = 20, 12
    params, logits, hidden, anchor = slow.random_block(name, seed=1, V=V, Vd=Vd, T=6)
    draft_to_target = np.sort(np.random.default_rng(2).choice(V, Vd, replace=False)).astype(np.int32)
    tokens, q, corrected = sequential_draft(
        TRANSITIONS[name], params, logits, hidden, anchor, jax.random.key(0), 0.0, draft_to_target
    )
    expected_tokens, expected = slow.greedy_sequential(name, params, logits, hidden, anchor, draft_to_target)
    np.testing.assert_array_equal(tokens, expected_tokens)
    close(corrected, expected)
    assert q.shape == (6, Vd)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_drafting_is_teacher_forcing_on_its_own_tokens(name):
    params, logits, hidden, anchor = slow.random_block(name, seed=3, lead=(3,), T=5)
    transition, keys = TRANSITIONS[name], jax.random.split(jax.random.key(1), 3)

    @jax.jit
    def both(temperature):
        draft = jax.vmap(lambda u, h, a, k: sequential_draft(transition, params, u, h, a, k, temperature))
        tokens, q, corrected = draft(logits, hidden, anchor, keys)
        predecessors = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=-1)
        return q, corrected, transitions.teacher_forced_logits(transition, params, logits, predecessors, hidden)

    for temperature in (0.0, 0.8):
        q, corrected, forced = both(temperature)
        close(corrected, forced)
        if temperature:
            close(q, jax.nn.softmax(corrected / temperature))


def test_context_with_unit_gate_is_vanilla():
    params, logits, hidden, _ = slow.random_block("context", lead=(2, 3))
    hidden[..., 0] = 1.0
    params["hidden_projection"] = np.zeros_like(params["hidden_projection"])
    params["hidden_projection"][0] = 1.0  # P h = 1
    predecessors = np.random.default_rng(5).integers(0, 20, (2, 3, 4))
    vanilla = {k: params[k] for k in ("predecessor", "successor")}
    np.testing.assert_array_equal(
        transitions.teacher_forced_logits(TRANSITIONS["context"], params, logits, predecessors, hidden),
        transitions.teacher_forced_logits(TRANSITIONS["vanilla"], vanilla, logits, predecessors, hidden),
    )


def test_joint_with_zero_gate_weights_is_half_of_vanilla():
    params, _, hidden, _ = slow.random_block("joint")
    params = params | {"gate_kernel": np.zeros_like(params["gate_kernel"]), "gate_bias": np.zeros(5, np.float32)}
    phi = transitions.teacher_forced_phi(TRANSITIONS["joint"], params, np.arange(4), hidden)
    close(phi, params["predecessor"][:4] / 2)


def test_recurrent_state_feeds_back():
    """With zero weights the state halves at each step and says nothing: a hand-checked case of the recurrence."""
    params, _, hidden, _ = slow.random_block("recurrent")
    params = {k: np.zeros_like(v) if k.startswith("joint") else v for k, v in params.items()}
    state = np.ones(5, np.float32)
    phi, state = TRANSITIONS["recurrent"].phi(params, params["predecessor"][0], hidden[0], state)
    np.testing.assert_array_equal(phi, np.zeros(5))
    np.testing.assert_array_equal(state, np.full(5, 0.5))


def test_first_order_leaves_the_state_alone():
    for name in slow.FIRST_ORDER:
        params, _, hidden, _ = slow.random_block(name)
        state = np.arange(5.0)
        assert TRANSITIONS[name].first_order
        assert TRANSITIONS[name].phi(params, transitions.embed(params, 0), hidden[0], state)[1] is state
    assert not TRANSITIONS["recurrent"].first_order


def test_none_has_no_parameters_and_no_term():
    assert TRANSITIONS["none"].parameter_shapes(10, 10, 4, 3) == {}
    _, logits, hidden, _ = slow.random_block("none")
    out = transitions.teacher_forced_logits(TRANSITIONS["none"], {}, logits, np.zeros(4, np.int32), hidden)
    np.testing.assert_array_equal(out, logits)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'markov'.*none, vanilla, context, joint, recurrent"):
        transitions.get_transition("markov")
    assert transitions.get_transition("joint") is TRANSITIONS["joint"]


def test_bfloat16_parameters_are_summed_in_float32():
    params, logits, hidden, anchor = slow.random_block("recurrent")
    half = {k: jnp.asarray(v, jnp.bfloat16) for k, v in params.items()}
    phi = transitions.teacher_forced_phi(TRANSITIONS["recurrent"], half, np.arange(4), hidden.astype(jnp.bfloat16))
    assert phi.dtype == jnp.bfloat16 and transitions.bias(half, phi).dtype == jnp.float32
    _, q, corrected = sequential_draft(TRANSITIONS["recurrent"], half, logits, hidden, anchor, jax.random.key(0), 1.0)
    assert q.dtype == corrected.dtype == jnp.float32


@pytest.mark.parametrize("name", ["vanilla", "context", "joint", "recurrent"])
def test_gradients_to_second_order(name):
    with jax.enable_x64(True):
        params, logits, hidden, _ = slow.random_block(name, V=6, D=3, R=2, T=3)
        params, logits, hidden = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) / 2, (params, logits, hidden))
        predecessors = jnp.array([1, 4, 4])
        f = jax.jit(lambda p, u, h: transitions.teacher_forced_logits(TRANSITIONS[name], p, u, predecessors, h))
        check_grads(f, (params, logits, hidden), order=2, modes=("fwd", "rev"))
