"""Measures the drafters of experiments/six.py, cell by cell.

  python -m experiments.measure --part=greedy --workdir=runs/six --out=experiments/greedy.json
  python -m experiments.measure --part=sampled --workdir=runs/six --out=experiments/sampled.json
  python -m experiments.measure --part=times --workdir=runs/six --out=experiments/times.json

greedy: temperature 0. The target answers every prompt once; what a drafter accepts is then read off those texts
  (experiments/known_text.py), which is what decoding would give, for every drafter, execution and number of candidates.
sampled: temperature 1. The target samples an answer to every prompt once; from those texts follows what a drafter
  accepts in expectation, under the token rule and under the block rule (experiments/sampled_text.py).
times: one draft of one block, by part, and the heads at every number of candidates.

Killed and started again with the same command, it goes on with the cells that are missing.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from dspark_jax import loading, union
from dspark_jax.checkpoints import run as run_checkpoints
from dspark_jax.data import sources
from experiments import cells, known_text, sampled_text, six, texts
from experiments.known_text import Way
from experiments.results import BLOCKS, COUNTS, NATIVE, SWEPT, summary
from train import command_line, loop, measure, timing

_PART = flags.DEFINE_enum("part", None, ("greedy", "sampled", "times"), "What to measure.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", "runs/six", "Where `experiments.train` trained the drafters.")
_OUT = flags.DEFINE_string("out", None, "JSON file of the cells.", required=True)
_DRAFTERS = flags.DEFINE_list("drafters", [*six.SIX, "long", "backbone"], "Which drafters.")
_SETS = flags.DEFINE_list("sets", list(sources.EVALUATION_SOURCES), "Which prompts.")
_COUNT = flags.DEFINE_integer("count", 60, "How many prompts of each set.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 20, "Prompts decoded together.", lower_bound=1)


def main():
    target = measure.load_target("smollm2-135m-instruct")
    found = cells.Cells(_OUT.value, cells.stamp_of(target))
    prompts = {name: [target.tokenizer.chat(p.messages) for p in sources.evaluation_prompts(name, _COUNT.value)]
               for name in _SETS.value}
    {"greedy": greedy, "sampled": sampled, "times": times}[_PART.value](target, found, prompts)
    print(f"{_OUT.value}: {len(found.found)} cells, none of those asked for is missing")


def answers(target, prompts, temperature):
    folder = pathlib.Path(_WORKDIR.value) / ("texts" if temperature == 0 else "sampled_texts")
    return texts.Texts(target, prompts, folder, tuple(six.get_config("backbone").drafter.target_layer_ids),
                       temperature=temperature, max_new_tokens=_MAX_NEW_TOKENS.value, batch_size=_BATCH_SIZE.value)


# ------------------------------------------------------------------------------------------------------- temperature 0


def ways_of(name, config):
    """{what it is called: Way} of the ways in which the drafter ``name`` is run."""
    ways = {"sequential": Way()}
    if config.transition in ("none", "recurrent") or name == "long":
        return ways
    ways["lattice 16"] = Way(16)
    if name in SWEPT:
        ways |= {f"lattice {M}": Way(M) for M in COUNTS}
        ways |= {f"union {M}": Way(M // 2, M // 2) for M in COUNTS if M > 1}
    return ways


def greedy(target, found, prompts):
    said = answers(target, prompts, 0.0)
    for name, drafter in drafters(target):
        blocks = BLOCKS if name == "long" else (drafter.config.block_length,)
        for T, set_name in ((T, set_name) for T in blocks for set_name in prompts):
            shorter = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, block_length=T))
            ways, suffix = ways_of(name, shorter.config), f" T={T}" if name == "long" else ""
            names = [f"{name}/{set_name}/{way}{suffix}" for way in [*ways, "ranks"]]
            if found.missing(names, cells.drafter_hash(drafter)):
                for cell_name, cell in zip(names, greedy_cells(shorter, said.of(set_name), ways, f"{name}/{set_name}")):
                    found.put(cell_name, {"drafter": cells.drafter_hash(drafter)} | cell)


def blocks_of(drafter, to_draft, text, length):
    """Anchors int [N], base logits, hidden states, labels as target ids and as draft ids, int [N, T], -1 where there is none.

    to_draft: int [V], draft id of each target id, of `loop.inverse`. length: anchors of the longest text; a shorter one's last is repeated, so that one shape is compiled.
    """
    config = drafter.config
    anchors = np.minimum(np.arange(length), len(text.answer) - 2)
    base, hidden = known_text.heads(config, drafter.params, drafter.embedding, drafter.head_rows, text.rows, text.tokens,
                                    jnp.asarray(text.prompt + anchors))
    labels = known_text.labels_of(text.answer, anchors, config.block_length)
    return anchors, base, hidden, labels, np.where(labels < 0, -1, to_draft[labels])


def greedy_cells(drafter, said, ways, description):
    """One cell for each way, and the cell of the base logits' ranks."""
    config, T = drafter.config, drafter.config.block_length
    tables = {K: union.successor_table(drafter.params["transition"], K) for K in {way.successors for way in ways.values()} if K}
    outcome, ranked, N = {way: [] for way in ways}, [], max(len(text.anchors) for text in said)
    to_draft = np.asarray(loop.inverse(drafter.draft_to_target, config.vocab_size))
    for text in tqdm.tqdm(said, desc=description, leave=False, dynamic_ncols=True):
        anchors, base, hidden, labels, draft_labels = blocks_of(drafter, to_draft, text, N)
        first = jnp.asarray(text.answer[anchors])
        for way, how in ways.items():
            drafted = known_text.paths(config, how, drafter.params, drafter.draft_to_target, base, hidden, first,
                                       tables.get(how.successors))
            outcome[way].append(known_text.rounds(np.asarray(drafted) == labels, len(text.answer)))
        rank = np.asarray(known_text.ranks(base, jnp.asarray(draft_labels)))
        ranked.append((np.where(labels < 0, config.draft_vocab_size, rank), len(text.answer)))
    return [summary(rounds, T) for rounds in outcome.values()] + [ranks_summary(ranked, T)]


def ranks_summary(ranked, T):
    """Of the base logits: for each number of candidates the share of labels among them, by position over all anchors, and
    the accepted length of the path that always takes the text's token where it is a candidate."""
    cell = {"recall": {}, "oracle": {}}
    for M in COUNTS:
        inside = [np.concatenate([rank[:length - 1 - t, t] < M for rank, length in ranked]) for t in range(T)]
        cell["recall"][str(M)] = [round(float(np.mean(shares)), 5) for shares in inside]
        whole = summary([known_text.rounds(rank < M, length) for rank, length in ranked], T)
        cell["oracle"][str(M)] = sum(whole["committed"]) / sum(whole["rounds"])
    return cell


# ------------------------------------------------------------------------------------------------------- temperature 1


def sampled_ways(name, config):
    """{what it is called: (candidates, 0 for all, and the rule of verification)}."""
    ways = {"sequential": (0, "token")}
    if config.transition not in ("none", "recurrent"):
        ways |= {f"lattice {M}": (M, "token") for M in (COUNTS if name in SWEPT else (16,))}
    return ways | {f"{NATIVE[name]}, block rule": (ways[NATIVE[name]][0], "block")}


def sampled(target, found, prompts):
    said = answers(target, prompts, 1.0)
    for name, drafter in drafters(target, skip=("long", "backbone")):
        for set_name in prompts:
            names = {f"{name}/{set_name}/{way}": how for way, how in sampled_ways(name, drafter.config).items()}
            missing = found.missing(names, cells.drafter_hash(drafter))
            ways = {cell_name: names[cell_name] for cell_name in missing}
            for cell_name, cell in sampled_cells(drafter, said.of(set_name), ways, f"{name}/{set_name}").items():
                found.put(cell_name, {"drafter": cells.drafter_hash(drafter)} | cell)


def sampled_cells(drafter, said, ways, description):
    """{name of the way: its cell}, with expectations in place of counts."""
    outcome, N = {way: [] for way in ways}, max(len(text.anchors) for text in said)
    to_draft = np.asarray(loop.inverse(drafter.draft_to_target, drafter.config.vocab_size))
    for text in tqdm.tqdm(said if ways else (), desc=description, leave=False, dynamic_ncols=True):
        anchors, base, hidden, labels, draft_labels = blocks_of(drafter, to_draft, text, N)
        at = np.minimum(anchors[:, None] + np.arange(labels.shape[1]), len(text.answer) - 1)
        predecessors = jnp.asarray(text.answer[at])
        log_p = jnp.asarray(text.log_p[np.minimum(at + 1, len(text.answer) - 1)])
        for way, (M, rule) in ways.items():
            ratios = np.asarray(sampled_text.ratios(
                drafter.config, M, drafter.params, base, hidden, predecessors, jnp.asarray(draft_labels), log_p))
            outcome[way].append(sampled_text.expected_rounds(
                sampled_text.survival(ratios[:len(text.anchors)], rule), len(text.answer)))
    plain = lambda values: [round(float(v), 4) for v in values]
    cells_of_ways = {}
    for way, found in outcome.items():
        rounds, committed, reached, accepted = zip(*found)
        cells_of_ways[way] = {"committed": plain(committed), "rounds": plain(rounds),
                              "reached": plain(np.sum(reached, axis=0)), "accepted": plain(np.sum(accepted, axis=0))}
    return cells_of_ways


# --------------------------------------------------------------------------------------------------------------- times


def times(target, found, prompts):
    """Batch 1. "backbone": a block behind a context of 256 tokens, with its base logits. The rest are heads alone, on
    those base logits."""
    del prompts
    for name, drafter in drafters(target, skip=("long", "backbone")):
        config, ways = drafter.config, ways_of(name, drafter.config)
        names = [f"{name}/{way}" for way in ["backbone", *ways]]
        if not found.missing(names, cells.drafter_hash(drafter)):
            continue
        S, width = 256, len(config.target_layer_ids) * config.backbone.hidden_size
        tokens, anchor = jnp.arange(S, dtype=jnp.int32) + 100, jnp.array([S - 1])
        rows = jax.random.normal(jax.random.key(0), (S, width), jnp.bfloat16)
        tables = {K: union.successor_table(drafter.params["transition"], K) for K in {way.successors for way in ways.values()} if K}
        backbone = functools.partial(known_text.heads, config, drafter.params, drafter.embedding, drafter.head_rows,
                                     rows, tokens, anchor)
        base, hidden = backbone()
        calls = {"backbone": backbone} | {
            way: functools.partial(known_text.paths, config, how, drafter.params, drafter.draft_to_target, base, hidden,
                                   tokens[anchor], tables.get(how.successors)) for way, how in ways.items()}
        for way, seconds in timing.alternate(calls, 40, settle=True, description=name).items():
            found.put(f"{name}/{way}", {"drafter": cells.drafter_hash(drafter)} | seconds)


def drafters(target, skip=()):
    """(name, `Drafter`) of those that are asked for; of the backbone one for each step that was kept."""
    workdir = pathlib.Path(_WORKDIR.value)
    for name in _DRAFTERS.value:
        if name in skip:
            continue
        if name == "backbone":
            for step in run_checkpoints.steps_of(workdir / name):
                yield f"{name} {step}", loading.load_drafter(workdir / name, target, step)
        else:
            yield name, loading.load_drafter(workdir / name, target)


if __name__ == "__main__":
    command_line.run(main)
