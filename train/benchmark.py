"""Times the parts of drafting, decoding and training, and prints tables.

  python -m train.benchmark                                  (everything below but `loading`)
  python -m train.benchmark --parts=head --head_batches=1 --head_drafts=7
  python -m train.benchmark --parts=decode --decode_drafts=3,4 --decode_prompts=4 --out=runs/decode.json
  python -m train.benchmark --parts=train --torch_python=/path/to/an/environment/with/torch/bin/python
  python -m train.benchmark --parts=loading --loading_scale=0.1

Parts:
  head     a block's tokens from its base logits: sequentially, on a lattice, and against reading the logits once
  decode   where the time of a draft-verify round goes, beside one plain step; plain and speculative decoding of the
           same prompts; one batch against single runs; a plain step against reading all weights once
  train    one optimiser step, beside the same step in plain PyTorch where there is a Python that has torch
  loading  the memory that loading a synthetic checkpoint takes; writes 3.1 GB to the temporary directory

What is compared is timed by turns, each program many times after it was compiled; the tables show "median (lower
quartile-upper quartile)". Nothing else should run on the machine. --out keeps all figures.
"""

import json
import pathlib
import sys

from absl import flags

import dspark_jax as ds
from dspark_jax.data import sources
from dspark_jax.drafter import EXECUTIONS
from train import benchmark_decode, benchmark_head, benchmark_loading, benchmark_train, command_line, measure, timing

PARTS = {"head": benchmark_head, "decode": benchmark_decode, "train": benchmark_train, "loading": benchmark_loading}

_PARTS = flags.DEFINE_list("parts", ["head", "decode", "train"], f"Which parts, of {', '.join(PARTS)}.")
_REPEATS = flags.DEFINE_integer("repeats", 50, "Timed calls of each program.", lower_bound=1)
_BUDGET = flags.DEFINE_float(
    "budget", 20.0, "Seconds for all timed calls of one program of head or train; a slower one is called less often, "
    "but five times.", lower_bound=0.0)
_OUT = flags.DEFINE_string("out", None, "JSON file for the results.")

_HEAD_VOCAB = flags.DEFINE_integer("head_vocab", 151936, "Tokens of the vocabulary.", lower_bound=1)
_HEAD_RANK = flags.DEFINE_integer("head_rank", 256, "Rank of the transition.", lower_bound=1)
_HEAD_CANDIDATES = flags.DEFINE_integer("head_candidates", 16, "Candidates per position of the lattice.", lower_bound=1)
_HEAD_DRAFTS = flags.DEFINE_list("head_drafts", ["7", "15"], "Draft positions of a block.")
_HEAD_BATCHES = flags.DEFINE_list("head_batches", ["1", "8"], "Blocks at once.")

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct",
    "Who verifies, for decode and train: a Hugging Face directory, a .gguf file or smollm2-135m-instruct.")
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: the directory of a saved drafter or of a training run.")
_EXECUTION = flags.DEFINE_enum(
    "execution", None, EXECUTIONS, "How decode drafts blocks; what the drafter declares if unset.")
_DECODE_DRAFTS = flags.DEFINE_list(
    "decode_drafts", ["2", "3", "4", "7"],
    "Drafts a block. Beyond what the drafter was trained for a round is timed, but nothing decoded.")
_DECODE_BATCHES = flags.DEFINE_list("decode_batches", ["1", "8"], "Prompts at once; 1 is always measured.")
_DECODE_PROMPTS = flags.DEFINE_integer("decode_prompts", 9, "How many prompts, from all sets by turns.", lower_bound=1)
_DECODE_REPEATS = flags.DEFINE_integer("decode_repeats", 3, "Timed answers to each prompt, each way.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=2)

_TRAIN_DRAFTS = flags.DEFINE_integer("train_drafts", 7, "Drafts a block.", lower_bound=1)
_TRAIN_ANCHORS = flags.DEFINE_integer("train_anchors", 64, "Blocks a step.", lower_bound=1)
_TRAIN_DTYPE = flags.DEFINE_enum(
    "train_dtype", "float32", ["float32", "bfloat16"], "What a step computes in; parameters stay in float32.")
_TORCH_PYTHON = flags.DEFINE_string(
    "torch_python", None, "A Python that has torch; this one if unset, and no PyTorch where it has none.")

_LOADING_SCALE = flags.DEFINE_float(
    "loading_scale", 1.0, "Share of the full size's layers and vocabulary.", lower_bound=0.01)
_LOADING_UNTIED = flags.DEFINE_bool("loading_untied", False, "Store an output table apart from the embedding.")


def main():
    # What can be wrong is found before anything takes long.
    parts = dict.fromkeys(_PARTS.value)
    if not parts or not parts.keys() <= PARTS.keys():
        raise ValueError(f"--parts={','.join(_PARTS.value)}: allowed: some of {', '.join(PARTS)}")
    if _HEAD_CANDIDATES.value > _HEAD_VOCAB.value:
        raise ValueError(f"--head_candidates={_HEAD_CANDIDATES.value}: allowed: 1 to {_HEAD_VOCAB.value}, "
                         "the vocabulary")
    numbers = {flag.name: command_line.whole_numbers(flag) for flag in (_HEAD_DRAFTS, _HEAD_BATCHES, _DECODE_DRAFTS, _DECODE_BATCHES)}
    torch_python = benchmark_train.torch_interpreter(_TORCH_PYTHON.value) if "train" in parts else None
    if _OUT.value:
        pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
    target = drafter = None
    if parts.keys() & {"decode", "train"}:
        measure.check_drafter(_DRAFTER.value)
        target = measure.load_target(_TARGET.value)
        drafter = ds.load_drafter(_DRAFTER.value, target)

    runs = {
        "head": lambda: benchmark_head.run(
            vocab=_HEAD_VOCAB.value, rank=_HEAD_RANK.value, candidates=_HEAD_CANDIDATES.value,
            drafts=numbers["head_drafts"], batches=numbers["head_batches"], repeats=_REPEATS.value,
            budget=_BUDGET.value),
        "decode": lambda: benchmark_decode.run(
            target, drafter, _prompts(target, _DECODE_PROMPTS.value), max_new_tokens=_MAX_NEW_TOKENS.value,
            drafts=numbers["decode_drafts"], batches=numbers["decode_batches"], execution=_EXECUTION.value,
            repeats=_REPEATS.value, decode_repeats=_DECODE_REPEATS.value),
        "train": lambda: benchmark_train.run(
            target, drafter, drafts=_TRAIN_DRAFTS.value, anchors=_TRAIN_ANCHORS.value, repeats=_REPEATS.value,
            budget=_BUDGET.value, dtype=_TRAIN_DTYPE.value, torch_python=torch_python),
        "loading": lambda: benchmark_loading.run(_LOADING_SCALE.value, _LOADING_UNTIED.value),
    }
    reads = timing.alternate(timing.memory_reads(), _REPEATS.value, _BUDGET.value, description="memory")
    rate = timing.memory_rate(reads)
    results = {"settings": {flag.name: flag.value for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])},
               "machine": measure.machine() | {"memory_bytes_per_second": rate}}
    for part in parts:
        results[part] = runs[part]()
        print(f"{part}\n\n{PARTS[part].report(results[part])}\n", flush=True)
        if _OUT.value:  # after each part: what is there stays, should a later one fail
            pathlib.Path(_OUT.value).write_text(json.dumps(results, indent=2) + "\n")
    machine = ", ".join(f"{name} {value}" for name, value in measure.machine().items())
    print(f"measured on: {machine}, memory read at {rate / 1e9:.1f} GB/s")


def _prompts(target, count):
    """``count`` token lists of held-out prompts, from all evaluation sets by turns."""
    names = sources.EVALUATION_SOURCES
    sets = [sources.evaluation_prompts(name, -(-count // len(names))) for name in names]
    return [target.tokenizer.chat(prompt.messages) for turn in zip(*sets) for prompt in turn][:count]


if __name__ == "__main__":
    command_line.run(main)
