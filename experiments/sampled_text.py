"""What sampling accepts of a text that the target is known to have sampled.

With p and q the laws of target and drafter behind the true tokens of a text y, and r_i = q_i(y_i) / p_i(y_i), the first k drafts
behind an anchor were accepted, given that the text is y, with probability

    token rule    s_k = prod_{i <= k} min(1, r_i)
    block rule    s_k = min(1, r_1, r_1 r_2, ..., r_1 ... r_k)

For the token rule accepts x with probability min(1, p / q), so y begins with k accepted drafts with probability
prod_i min(p_i(y_i), q_i(y_i)), while the output as a whole has the target's law prod_i p_i(y_i), whatever was accepted. For the
block rule (Sun et al., 2024) the chance to accept at least k drafts x is w_k = min(1, w_{k-1} p_k(x_k) / q_k(x_k)), which
leaves prod_{i <= k} q_i(y_i) w_k = prod_{i <= k} p_i(y_i) s_k in the same way. s_k is never smaller than the token rule's.

No draft has to be drawn and no target has to run: one sampled text gives the expected rounds of every drafter exactly,
without the noise of the drafts.

N anchors, T draft positions, Vd draft vocabulary, D model width, M candidates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import transitions
from dspark_jax.candidates import top_candidates


@functools.partial(jax.jit, static_argnames=("config", "M"))
def ratios(config, M, params, base, hidden, predecessors, labels, log_p):
    """r = q(y) / p(y) of every draft, float32 [N, T], at temperature 1; 0 where y cannot be drafted.

    M: candidates, 0: drafts are drawn from all tokens. base [N, T, Vd], hidden [N, T, D] of `known_text.heads`; predecessors
    int [N, T], target ids of the tokens before; labels int [N, T], draft ids of the tokens y, -1 where they cannot be
    drafted; log_p [N, T], log p(y).
    """
    transition, table = transitions.get_transition(config.transition), params.get("transition", {})
    logits = base + transitions.bias(table, transitions.teacher_forced_phi(transition, table, predecessors, hidden))
    drafted = labels >= 0
    at = jnp.maximum(labels, 0)[..., None]
    score = jnp.take_along_axis(logits, at, axis=-1)[..., 0]
    if M:
        _, best = top_candidates(base, M)
        inside = base >= best[..., -1:]
        drafted &= jnp.take_along_axis(inside, at, axis=-1)[..., 0]
        logits = jnp.where(inside, logits, -jnp.inf)
    log_q = score - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(drafted, jnp.exp(log_q - log_p), 0.0)


def survival(ratios, rule="token"):
    """s_0 = 1, s_1, ..., s_T: [N, T] -> float64 [N, T + 1]."""
    ratios = np.asarray(ratios, np.float64)
    if rule == "token":
        s = np.cumprod(np.minimum(ratios, 1.0), axis=1)
    else:
        s = np.minimum.accumulate(np.minimum(np.cumprod(ratios, axis=1), 1.0), axis=1)
    return np.concatenate([np.ones((len(s), 1)), s], axis=1)


def expected_rounds(survive, length):
    """The rounds along a text in expectation: survive [N, T + 1] of `survival`, behind each anchor i; length: N + 1 tokens of
    answer, of which the first comes from the prompt's own pass.

    -> rounds, committed: floats; reached, accepted [T]: rounds that come to draft t, and that accept it. A round that reaches
    the end of the text commits what is left, as in `known_text.rounds`.
    """
    T = survive.shape[1] - 1
    visits = np.zeros(length)
    visits[0], committed = 1.0, 0.0
    reached, accepted = np.zeros((2, T))
    for i in range(length - 1):
        left = length - 1 - i
        s = survive[i, :min(T, left) + 1]  # what is accepted behind the end is cut off
        exactly = s - np.append(s[1:], 0.0)
        behind = i + 1 + np.arange(len(s))
        visits[behind[behind < length - 1]] += visits[i] * exactly[behind < length - 1]
        committed += visits[i] * np.sum(exactly * (np.arange(len(s)) + 1))
        reached[:len(s) - 1] += visits[i] * s[:-1]
        accepted[:len(s) - 1] += visits[i] * s[1:]
    return float(np.sum(visits[:length - 1])), float(committed), reached, accepted
