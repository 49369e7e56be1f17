"""The lattices of candidates behind the tokens of a known answer, as a picture of one of them shows them."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import copying
from dspark_jax.candidates import top_candidates
from dspark_jax.lattice import pair_scores, walk
from dspark_jax.transitions import get_transition, target_ids
from experiments import known_text
from train import features


class Lattices:
    """The lattices of M candidates behind all tokens of an answer, walked greedily."""

    def __init__(self, target, drafter, prompt, answer, M):
        self.target, self.answer, config = target, answer, drafter.config
        tokens = jnp.array([*prompt, *answer], jnp.int32)
        rows = features.rows_of(target.config, target.params, tokens[None], config.target_layer_ids)[0]
        anchors = jnp.arange(len(answer) - config.block_length)
        base, hidden = known_text.heads(config, drafter.params, drafter.embedding, drafter.head_rows,
                                        rows[:, :-target.config.hidden_size], tokens, len(prompt) + anchors)

        copied = known_text.copied(config, drafter.params, drafter.draft_to_target, hidden, tokens, len(prompt) + anchors)

        def one(base, hidden, anchor, copied):
            ids, unary = copying.admit(*top_candidates(base, M), base, copied)
            first, pairs = pair_scores(get_transition(config.transition), drafter.params.get("transition", {}), unary, ids,
                                       hidden, anchor, drafter.draft_to_target, copied)
            slots, _ = walk(first, pairs, jax.random.key(0), 0.0)
            return target_ids(ids, drafter.draft_to_target), first, pairs, slots

        found = jax.jit(jax.vmap(one))(base, hidden, jnp.asarray(answer[np.asarray(anchors)]), copied)
        self.ids, self.first, self.pairs, self.slots = map(np.asarray, found)

    def drafted(self, at):
        return self.ids[at][np.arange(len(self.slots[at])), self.slots[at]]

    def said(self, at):
        return self.answer[at + 1 : at + 1 + len(self.slots[at])]

    def accepted(self, at):
        return int(np.cumprod(self.drafted(at) == self.said(at)).sum())

    def picture(self, at, K):
        """The arguments of `plots.lattice_diagram`: the K - 1 best candidates of each position, or K, with the walked one."""
        ids, slots, T = self.ids[at], self.slots[at], len(self.slots[at])
        rows = [[*range(K)] if s < K else [*range(K - 1), int(s)] for s in slots]
        laws = [_softmax(self.first[at])[None]] + [_softmax(pairs) for pairs in self.pairs[at]]
        text = lambda token: self.target.tokenizer.decode([int(token)], control_tokens=True)
        return {
            "anchor": text(self.answer[at]),
            "candidates": [[text(ids[t, k]) for k in rows[t]] for t in range(T)],
            "probabilities": np.array([laws[t][slots[t - 1] if t else 0][rows[t]] for t in range(T)]),
            "transitions": np.array([laws[t + 1][np.ix_(rows[t], rows[t + 1])] for t in range(T - 1)]),
            "slots": np.array([rows[t].index(s) for t, s in enumerate(slots)]),
            "accepted": self.accepted(at), "said": [text(token) for token in self.said(at)]}


def _softmax(scores):
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
