"""The slow obvious version of drafting: plain NumPy in float64, one token at a time."""

import numpy as np

FIRST_ORDER = ("none", "vanilla", "context", "joint")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def phi(name, params, a, h, state):
    """phi_t(a) and the next state for one token id and one hidden vector, from the table in the design."""
    if name == "none":
        return None, state
    e = np.asarray(params["predecessor"], np.float64)[a]
    h = np.asarray(h, np.float64)
    if name == "vanilla":
        return e, state
    if name == "context":
        return (h @ params["hidden_projection"]) * e, state
    if name == "joint":
        return sigmoid(np.concatenate([h, e]) @ params["gate_kernel"] + params["gate_bias"]) * e, state
    u_g, u_c, u_o = np.split(np.concatenate([state, e, h]) @ params["joint_kernel"] + params["joint_bias"], 3)
    g = sigmoid(u_g)
    return np.tanh(u_o), g * state + (1 - g) * np.tanh(u_c)


def scores(name, params, unary, a, h, state):
    """U_t(b) + < phi_t(a), B[b] > for all b, one b at a time; and the next state."""
    f, state = phi(name, params, a, h, state)
    term = [0.0 if f is None else float(np.dot(f, params["successor"][b])) for b in range(len(unary))]
    return np.asarray(unary, np.float64) + term, state


def greedy_sequential(name, params, logits, hidden, anchor, draft_to_target=None):
    """Tokens [T] (target ids) and corrected logits [T, Vd]."""
    rank = np.shape(params["successor"])[-1] if params else 0
    previous, state, tokens, corrected = int(anchor), np.zeros(rank), [], []
    for unary, h in zip(logits, hidden):
        s, state = scores(name, params, unary, previous, h, state)
        best = int(np.argmax(s))
        previous = best if draft_to_target is None else int(draft_to_target[best])
        tokens.append(previous)
        corrected.append(s)
    return np.array(tokens), np.array(corrected)


def law_term(statistics, head):
    """The confidence head's hidden layer, one unit at a time."""
    kernel, bias, output = (np.asarray(head[name], np.float64) for name in ("kernel", "bias", "output"))
    term = 0.0
    for unit in range(len(bias)):
        z = statistics @ kernel[:, unit] + bias[unit]
        term += output[unit] * z * sigmoid(z)
    return term


def top(logits, M):
    """Ids of the M largest, best first, equal ones by smaller id: by sorting Python tuples."""
    return [i for _, i in sorted((-float(x), i) for i, x in enumerate(logits))[:M]]


def greedy_lattice(name, params, logits, hidden, anchor, M, draft_to_target=None):
    """Tokens [T], candidates [T, M] (both target ids) and, per step, the M scores chosen from."""
    to_target = (lambda i: i) if draft_to_target is None else (lambda i: int(draft_to_target[i]))
    previous, tokens, lists, rows = int(anchor), [], [], []
    for unary, h in zip(logits, hidden):
        candidates = top(unary, M)
        s = scores(name, params, unary, previous, h, None)[0][candidates]
        previous = to_target(candidates[int(np.argmax(s))])
        tokens.append(previous)
        lists.append([to_target(c) for c in candidates])
        rows.append(s)
    return np.array(tokens), np.array(lists), np.array(rows)


def random_block(name, seed=0, V=20, Vd=None, D=6, R=5, T=4, lead=()):
    """Random parameters and inputs of one block: params, logits [..., T, Vd], hidden [..., T, D], anchor [...]."""
    from dspark_jax.transitions import TRANSITIONS

    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    Vd = V if Vd is None else Vd
    params = {k: normal(*shape) for k, shape in TRANSITIONS[name].parameter_shapes(V, Vd, D, R).items()}
    anchor = rng.integers(0, V, lead).astype(np.int32)
    return params, normal(*lead, T, Vd), normal(*lead, T, D), anchor
