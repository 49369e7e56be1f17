"""Checks on held-out prompts that speculative decoding says what plain greedy decoding says, token for token.

  python -m train.identity --count=34 --out=benchmarks/identity.json
  python -m train.identity --drafter=runs/quickstart --sets=chat --batch_sizes=4 --executions=lattice

Every prompt is decoded without the drafter, one by one, and with it in batches of each size and by each execution. Another
number of tokens in one product is another order of float32 additions, so two tokens that the target likes equally well may
change places. Where the texts part, "gap" is how far the target's logit of plain decoding's token lies above that of the
other, in one pass over the common text: within 1e-3 it is a tie, anything else is an error, and then the program ends with
code 1.
"""

import json
import pathlib
import sys

import tqdm
from absl import flags

import dspark_jax as ds
from dspark_jax.data import sources
from dspark_jax.drafter import EXECUTIONS
from train import command_line, measure

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Who verifies: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: the directory of a saved drafter or of a training run."
)
_SETS = flags.DEFINE_list("sets", list(sources.EVALUATION_SOURCES), "Which prompts.")
_COUNT = flags.DEFINE_integer("count", 20, "How many prompts of each set.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=1)
_EXECUTIONS = flags.DEFINE_list("executions", list(EXECUTIONS), "How blocks are drafted.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["1", "8"], "Prompts decoded together.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the results.")


def main():
    sizes = command_line.whole_numbers(_BATCH_SIZES)
    for execution in _EXECUTIONS.value:
        if execution not in EXECUTIONS:
            raise ValueError(f"--executions: {execution!r}; allowed: {', '.join(EXECUTIONS)}")
    conversations = [p for name in _SETS.value for p in sources.evaluation_prompts(name, _COUNT.value)]
    measure.check_drafter(_DRAFTER.value)
    target = measure.load_target(_TARGET.value)
    drafter = measure.load_drafter(_DRAFTER.value, target)
    prompts = [target.tokenizer.chat(p.messages) for p in conversations]

    plain = decode(target, None, prompts, 1, None, "plain")
    rows = []
    for execution in _EXECUTIONS.value:
        for size in sizes:
            said = decode(target, drafter, prompts, size, execution, f"{execution}, batch {size}")
            parted = [measure.parting(target, p, a, b) | {"prompt": c.id} for p, a, b, c in zip(prompts, plain, said, conversations)
                      if a != b]
            rows.append({"execution": execution, "batch": size, "prompts": len(prompts), "tokens": sum(map(len, said)),
                         "identical": len(prompts) - len(parted), "ties": sum(abs(p["gap"]) <= measure.TIE for p in parted),
                         "parted": parted})
    print(measure.table(
        ["execution", "batch", "prompts", "tokens", "identical", "ties"],
        [[str(row[name]) for name in ("execution", "batch", "prompts", "tokens", "identical", "ties")] for row in rows]))
    for row in rows:
        for p in row["parted"]:
            print(f"{row['execution']}, batch {row['batch']}: {p['prompt']} parts at token {p['at']}, gap {p['gap']:.2g}")
    if _OUT.value:
        pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(_OUT.value).write_text(json.dumps({
            "drafter": _DRAFTER.value, "max_new_tokens": _MAX_NEW_TOKENS.value, "sets": _SETS.value, "tie": measure.TIE,
            "machine": measure.machine(), "results": rows}, indent=1) + "\n")
    if any(row["identical"] + row["ties"] < row["prompts"] for row in rows):
        sys.exit(1)


def decode(target, drafter, prompts, size, execution, description):
    """Greedy answers, ``size`` prompts at a time."""
    said = []
    with tqdm.tqdm(total=len(prompts), desc=description, unit="prompt", leave=False, dynamic_ncols=True) as bar:
        for start in range(0, len(prompts), size):
            part = prompts[start:start + size]
            said += ds.generate(target, drafter, part, max_new_tokens=_MAX_NEW_TOKENS.value, execution=execution).tokens
            bar.update(len(part))
    return said


if __name__ == "__main__":
    command_line.run(main)
