"""Measures the drafters of experiments/six.py, cell by cell.

  python -m experiments.measure --part=greedy --workdir=runs/six --out=experiments/greedy.json
  python -m experiments.measure --part=sampled --workdir=runs/six --out=experiments/sampled.json
  python -m experiments.measure --part=times --workdir=runs/six --out=experiments/times.json

greedy: temperature 0. The target answers every prompt once; what a drafter accepts is then read off those texts
  (experiments/known_text.py), which is what decoding would give, for every drafter, execution and number of candidates.
sampled: temperature 1, by decoding, with the token rule and with the block rule.
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

import dspark_jax as ds
from dspark_jax import loading, union
from dspark_jax.checkpoints import run as run_checkpoints
from dspark_jax.data import sources
from dspark_jax.data.documents import Documents
from experiments import cells, known_text, six
from experiments.known_text import Way
from experiments.results import BLOCKS, COUNTS, SWEPT
from train import command_line, features, loop, measure, timing

_PART = flags.DEFINE_enum("part", None, ("greedy", "sampled", "times"), "What to measure.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", "runs/six", "Where `experiments.train` trained the drafters.")
_OUT = flags.DEFINE_string("out", None, "JSON file of the cells.", required=True)
_DRAFTERS = flags.DEFINE_list("drafters", [*six.SIX, "long", "backbone"], "Which drafters.")
_SETS = flags.DEFINE_list("sets", list(sources.EVALUATION_SOURCES), "Which prompts.")
_COUNT = flags.DEFINE_integer("count", 60, "How many prompts of each set.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 20, "Prompts decoded together.", lower_bound=1)

BUCKET = 64  # texts are padded to a multiple of this, so that few shapes are compiled


def main():
    target = measure.load_target("smollm2-135m-instruct")
    found = cells.Cells(_OUT.value, cells.stamp_of(target))
    prompts = {name: [target.tokenizer.chat(p.messages) for p in sources.evaluation_prompts(name, _COUNT.value)]
               for name in _SETS.value}
    {"greedy": greedy, "sampled": sampled, "times": times}[_PART.value](target, found, prompts)
    print(f"{_OUT.value}: {len(found.found)} cells, none of those asked for is missing")


# ------------------------------------------------------------------------------------------------------- temperature 0


def ways_of(name, config):
    """{what it is called: Way} of the ways in which the drafter ``name`` is run."""
    ways = {"sequential": Way()}
    if config.transition in ("none", "recurrent"):
        return ways
    ways["lattice 16"] = Way(16)
    if name in SWEPT:
        ways |= {f"lattice {M}": Way(M) for M in COUNTS}
        ways |= {f"union {M}": Way(M // 2, M // 2) for M in COUNTS if M > 1}
    return ways


def greedy(target, found, prompts):
    texts = Texts(target, prompts)
    for name, drafter in drafters(target):
        blocks = BLOCKS if name == "long" else (drafter.config.block_length,)
        for T, set_name in ((T, set_name) for T in blocks for set_name in prompts):
            config = dataclasses.replace(drafter.config, block_length=T)
            ways = ways_of(name, config) if name != "long" else {"sequential": Way()}
            suffix = f" T={T}" if len(blocks) > 1 else ""
            names = [f"{name}/{set_name}/{way}{suffix}" for way in [*ways, "ranks"]]
            if found.missing(names, cells.drafter_hash(drafter)):
                measured = greedy_cells(target, dataclasses.replace(drafter, config=config), texts, set_name, ways)
                for cell_name, cell in zip(names, measured):
                    found.put(cell_name, {"drafter": cells.drafter_hash(drafter)} | cell)


def greedy_cells(target, drafter, texts, set_name, ways):
    """One cell for each way, and the cell of the base logits' ranks."""
    config, T = drafter.config, drafter.config.block_length
    to_draft = np.asarray(loop.inverse(drafter.draft_to_target, config.vocab_size))
    tables = {K: union.successor_table(drafter.params["transition"], K) for K in {way.successors for way in ways.values()} if K}
    outcome = {way: [] for way in ways}
    ranked = []
    for tokens, rows, prompt, answer in tqdm.tqdm(texts.of(set_name), desc=set_name, leave=False, dynamic_ncols=True):
        anchors = np.minimum(np.arange(texts.anchors), len(answer) - 2)
        base, hidden = known_text.heads(config, drafter.params, drafter.embedding, drafter.head_rows,
                                        rows, tokens, jnp.asarray(prompt + anchors))
        labels = known_text.labels_of(answer, anchors, T)
        first = jnp.asarray(answer[anchors])
        for way, how in ways.items():
            drafted = known_text.paths(config, how, drafter.params, drafter.draft_to_target, base, hidden, first,
                                       tables.get(how.successors))
            outcome[way].append(known_text.rounds(np.asarray(drafted) == labels, len(answer)))
        rank = np.asarray(known_text.ranks(base, jnp.asarray(np.where(labels < 0, -1, to_draft[labels]))))
        ranked.append((np.where(labels < 0, config.draft_vocab_size, rank), len(answer)))
    return [summary(rounds, T) for rounds in outcome.values()] + [ranks_summary(ranked, T)]


def summary(rounds, T):
    """Plain values of the (accepted, proposed) lists of some prompts: "committed" and "rounds" of each prompt, and by
    position how many rounds "reached" it and how many "accepted" it."""
    pairs = [(a, p) for accepted, proposed in rounds for a, p in zip(accepted, proposed)]
    return {"committed": [sum(accepted) + len(accepted) for accepted, _ in rounds],
            "rounds": [len(accepted) for accepted, _ in rounds],
            "reached": [sum(a >= t and p > t for a, p in pairs) for t in range(T)],
            "accepted": [sum(a > t for a, _ in pairs) for t in range(T)]}


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


class Texts:
    """The target's greedy answers to the prompts, and its features of them, kept in the work directory."""

    def __init__(self, target, prompts):
        folder = pathlib.Path(_WORKDIR.value) / "texts"
        folder.mkdir(parents=True, exist_ok=True)
        self.anchors, self._sets = _MAX_NEW_TOKENS.value - 1, {}
        for name, tokens in prompts.items():
            file = folder / f"{name}.npz"
            if not file.exists():
                answers = decode(target, None, tokens, name, temperature=0.0).tokens
                Documents.pack([([*p, *a], [False] * len(p) + [True] * len(a), name) for p, a in zip(tokens, answers)]).save(file)
            said = Documents.load(file)
            if len(said) != len(tokens):
                raise ValueError(f"{file}: {len(said)} answers, {len(tokens)} prompts; delete it, or give the same --count")
            sequences = [said.document(i)[0] for i in range(len(said))]
            taps = configuration_taps()
            with tqdm.tqdm(total=len(said), desc=f"features of {name}", leave=False, dynamic_ncols=True) as bar:
                stored = features.compute(target, sequences, taps, folder / name, batch=4,
                                          progress=lambda done, total: bar.update(done - bar.n))
            self._sets[name] = said, stored, len(taps) * target.config.hidden_size

    def of(self, name):
        """[(tokens int32 [S], features bfloat16 [S, taps * D], length of the prompt, answer int [..])]; S is padded."""
        said, stored, width = self._sets[name]
        texts = []
        for i in range(len(said)):
            (tokens, answered), (rows, _) = said.document(i), stored.of(i)
            extra = -len(tokens) % BUCKET
            prompt = int(np.argmax(answered))
            if len(tokens) - prompt > 1:  # an answer of one token has no round
                texts.append((jnp.asarray(np.pad(tokens.astype(np.int32), (0, extra))),
                              jnp.asarray(np.pad(rows[:, :width], ((0, extra), (0, 0)))), prompt, tokens[prompt:].astype(np.int32)))
        return texts


def configuration_taps():
    return tuple(six.get_config("backbone").drafter.target_layer_ids)


# ------------------------------------------------------------------------------------------------------- temperature 1


def sampled_ways(name, config):
    """{what it is called: arguments of ds.generate}."""
    ways = {"sequential": {"execution": "sequential"}}
    if name == "selector":
        ways = {"lattice 16": {"execution": "lattice", "candidates": 16}}
    elif name in ("vanilla", "context"):
        ways["lattice 16"] = {"execution": "lattice", "candidates": 16}
    if name in ("vanilla", "selector"):
        ways |= {f"{way}, block rule": options | {"verification": "block"} for way, options in ways.items()}
    return ways


def sampled(target, found, prompts):
    for name, drafter in drafters(target, skip=("long", "backbone")):
        for way, options in sampled_ways(name, drafter.config).items():
            for set_name, tokens in prompts.items():
                cell_name = f"{name}/{set_name}/{way}"
                if found.missing([cell_name], cells.drafter_hash(drafter)):
                    result = decode(target, drafter, tokens, cell_name, temperature=1.0, **options)
                    found.put(cell_name, {"drafter": cells.drafter_hash(drafter)} | summary(
                        list(zip(result.accepted, result.proposed)), drafter.config.block_length))


def decode(target, drafter, prompts, description, **options):
    """`ds.generate`, some prompts at a time, those of like length together; in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    parts = []
    for start in tqdm.trange(0, len(order), _BATCH_SIZE.value, desc=description, leave=False, dynamic_ncols=True):
        batch = [prompts[i] for i in order[start:start + _BATCH_SIZE.value]]
        parts.append(ds.generate(target, drafter, batch, max_new_tokens=_MAX_NEW_TOKENS.value, seed=start, **options))
    names = [field.name for field in dataclasses.fields(ds.Result)]
    merged = {name: sum((getattr(part, name) for part in parts), []) for name in names}
    back = np.argsort(order)
    return ds.Result(**{name: [rows[i] for i in back] if rows else rows for name, rows in merged.items()})


# --------------------------------------------------------------------------------------------------------------- times


def times(target, found, prompts):
    """Batch 1. "backbone": a block behind a context of 256 tokens, with its base logits. The rest are heads alone, on
    those base logits."""
    for name, drafter in drafters(target, skip=("long", "backbone")):
        config = drafter.config
        ways = ways_of(name, config)
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
        measured = timing.alternate(calls, 40, settle=True, description=name)
        for way, summary_of in measured.items():
            found.put(f"{name}/{way}", {"drafter": cells.drafter_hash(drafter)} | summary_of)


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
