"""What the shipped drafter accepts of known greedy text, with its copy term, without it, and what plain copying would do.

  python -m experiments.shipped --out=experiments/shipped.json

"rule": the drafter without its term, but what followed the longest earlier agreement wherever that has two tokens or more,
whether a token can be drafted or not. "better of both": of the drafter and the copy the one that has more of the text right,
block by block, which nobody can know beforehand. The texts, and so their rounds, are those of `experiments.measure`.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import dspark_jax as ds
from dspark_jax import copying
from dspark_jax.checkpoints import conversions
from dspark_jax.data import sources
from experiments import known_text, texts
from experiments.known_text import Way
from train import command_line, measure

_DRAFTER = flags.DEFINE_string("drafter", str(measure.SHIPPED_DRAFTER), "Directory of a drafter that has a copy term.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/six", "Where the target's answers are kept.")
_OUT = flags.DEFINE_string("out", None, "JSON file of the result.", required=True)
_BLOCK_LENGTHS = flags.DEFINE_list("block_lengths", ["3", "7"], "How many drafts a block has.")
_COUNT = flags.DEFINE_integer("count", 60, "How many prompts of each set.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 20, "Prompts decoded together.", lower_bound=1)

ENOUGH = 2  # tokens of agreement, for the rule


def drafts(drafter, text, T):
    """{what drafts: tokens int [N, T]} behind every anchor of a `texts.Text`}, and the text's tokens there, int [N, T]."""
    c = dataclasses.replace(drafter.config, block_length=T, confidence_temperatures=())
    way = Way(c.usable_candidates if c.execution == "lattice" else 0)
    N = len(text.anchors)
    at = jnp.asarray(text.prompt + np.minimum(np.arange(_MAX_NEW_TOKENS.value), N - 1))  # one shape for all texts
    base, hidden = known_text.heads(c, drafter.params, drafter.embedding, drafter.head_rows, text.rows, text.tokens, at)
    block = drafter.draft_to_target, base, hidden, text.tokens[at]
    copied = known_text.copied(c, drafter.params, drafter.draft_to_target, hidden, text.tokens, at)
    bare = conversions.without_copying(drafter)
    alone = known_text.paths(dataclasses.replace(c, copy_length=0), way, bare.params, *block)
    copies, n = jax.vmap(lambda last: copying.find(text.tokens, last, c.copy_length, T))(at)
    found = {"drafter without the term": alone, "drafter": known_text.paths(c, way, drafter.params, *block, copied=copied),
             "rule": jnp.where((n >= ENOUGH)[:, None], copies, alone)}
    found = {name: np.asarray(tokens)[:N] for name, tokens in found.items()}
    labels = known_text.labels_of(text.answer, text.anchors, T)
    right = lambda tokens: np.cumprod(tokens == labels, axis=1).sum(axis=1)[:, None]
    with_term, copy = found["drafter"], np.asarray(copies)[:N]
    return found | {"better of both": np.where(right(copy) > right(with_term), copy, with_term)}, labels


def lengths(drafter, said, T):
    """{what drafts: {set: accepted length}}, said {set: [`texts.Text`]}."""
    accepted = {}
    for name, answers in said.items():
        for text in answers:
            found, labels = drafts(drafter, text, T)
            for who, tokens in found.items():
                accepted.setdefault(who, {}).setdefault(name, []).extend(
                    known_text.rounds(tokens == labels, len(text.answer))[0])
    return {who: {name: 1 + float(np.mean(rounds)) for name, rounds in sets.items()} for who, sets in accepted.items()}


def main():
    blocks = command_line.whole_numbers(_BLOCK_LENGTHS)
    measure.check_drafter(_DRAFTER.value)
    target = measure.load_target("smollm2-135m-instruct")
    drafter = ds.load_drafter(_DRAFTER.value, target)
    if not drafter.config.copy_length:
        raise ValueError(f"--drafter: {_DRAFTER.value} has no copy term; allowed: a drafter that has one")
    prompts = {name: [target.tokenizer.chat(p.messages) for p in sources.evaluation_prompts(name, _COUNT.value)]
               for name in sources.EVALUATION_SOURCES}
    said = texts.Texts(target, prompts, pathlib.Path(_WORKDIR.value) / "texts", drafter.config.target_layer_ids, temperature=0.0,
                       max_new_tokens=_MAX_NEW_TOKENS.value, batch_size=_BATCH_SIZE.value)
    said = {name: said.of(name) for name in prompts}
    results = {f"{T} drafts": lengths(drafter, said, T) for T in blocks}
    rows = [[f"{who}, {T}", *(f"{sets[name]:.3f}" for name in prompts), f"{np.mean(list(sets.values())):.3f}"]
            for T, found in results.items() for who, sets in found.items()]
    print(measure.table(["accepted length", *prompts, "mean"], rows))
    settings = {"drafter": _DRAFTER.value, "count": _COUNT.value, "max_new_tokens": _MAX_NEW_TOKENS.value}
    pathlib.Path(_OUT.value).write_text(json.dumps({"settings": settings, "machine": measure.machine()} | results, indent=2) + "\n")


if __name__ == "__main__":
    command_line.run(main)
