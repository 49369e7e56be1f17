"""Draws one lattice of real decoding: candidates, the laws between them, the walk, and what the target says.

  python -m experiments.lattice --accepted=2 --prompt=7 --out=experiments/lattice.png

Drawn is the first block of the answer that has --accepted drafts accepted, or the one behind token --anchor of it.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import dspark_jax as ds
from dspark_jax.candidates import top_candidates
from dspark_jax.data import sources
from dspark_jax.lattice import pair_scores, walk
from dspark_jax.transitions import get_transition, target_ids
from experiments import known_text
from train import command_line, features, measure, plots

_DRAFTER = flags.DEFINE_string("drafter", str(measure.SHIPPED_DRAFTER), "Whose lattice.")
_SET = flags.DEFINE_enum("set", "gsm8k", sources.EVALUATION_SOURCES, "Which prompts.")
_PROMPT = flags.DEFINE_integer("prompt", 0, "Which of them.", lower_bound=0, upper_bound=59)
_ANCHOR = flags.DEFINE_integer("anchor", None, "Which token of the answer the block stands behind.", lower_bound=0)
_ACCEPTED = flags.DEFINE_integer("accepted", 3, "Drafts accepted in the block to look for.", lower_bound=0)
_CANDIDATES = flags.DEFINE_integer("candidates", 16, "Candidates of each position.", lower_bound=2)
_SHOWN = flags.DEFINE_integer("shown", 8, "How many of them are drawn.", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "The picture; beside it a .json with what it shows.", required=True)


def main():
    plots.check()
    measure.check_drafter(_DRAFTER.value)
    target = measure.load_target("smollm2-135m-instruct")
    drafter = measure.load_drafter(_DRAFTER.value, target)
    conversation = sources.evaluation_prompts(_SET.value, 60)[_PROMPT.value]
    prompt = target.tokenizer.chat(conversation.messages)
    answer = np.array(ds.generate(target, None, [prompt], max_new_tokens=96).tokens[0])
    lattices = Lattices(target, drafter, prompt, answer, _CANDIDATES.value)
    T = drafter.config.block_length
    known = range(len(answer) - T)
    if _ANCHOR.value is None:
        at = next((i for i in known if lattices.accepted(i) == _ACCEPTED.value), None)
        if at is None:
            raise ValueError(f"--accepted={_ACCEPTED.value}: no block of this answer; allowed: "
                             f"{sorted({lattices.accepted(i) for i in known})}")
    elif _ANCHOR.value not in known:
        raise ValueError(f"--anchor={_ANCHOR.value}: allowed: 0 to {len(answer) - T - 1}, as the answer has {len(answer)} tokens")
    else:
        at = _ANCHOR.value
    shown = lattices.picture(at, _SHOWN.value) | {"title": f"{conversation.id}, behind token {at} of the answer"}
    plots.lattice_diagram(_OUT.value, **shown)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in shown.items()}
    pathlib.Path(_OUT.value).with_suffix(".json").write_text(json.dumps(plain) + "\n")
    print(f"{_OUT.value}: {shown['title']}: {shown['accepted']} of {T} drafts accepted")


class Lattices:
    """The lattices of M candidates behind all tokens of an answer, walked greedily."""

    def __init__(self, target, drafter, prompt, answer, M):
        self.target, self.answer, config = target, answer, drafter.config
        tokens = jnp.array([*prompt, *answer], jnp.int32)
        rows = features.rows_of(target.config, target.params, tokens[None], config.target_layer_ids)[0]
        anchors = jnp.arange(len(answer) - config.block_length)
        base, hidden = known_text.heads(config, drafter.params, drafter.embedding, drafter.head_rows,
                                        rows[:, :-target.config.hidden_size], tokens, len(prompt) + anchors)

        def one(base, hidden, anchor):
            ids, unary = top_candidates(base, M)
            first, pairs = pair_scores(get_transition(config.transition), drafter.params.get("transition", {}), unary, ids,
                                       hidden, anchor, drafter.draft_to_target)
            slots, _ = walk(first, pairs, jax.random.key(0), 0.0)
            return target_ids(ids, drafter.draft_to_target), first, pairs, slots

        found = jax.jit(jax.vmap(one))(base, hidden, jnp.asarray(answer[np.asarray(anchors)]))
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


if __name__ == "__main__":
    command_line.run(main)
