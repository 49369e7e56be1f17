"""Measures a drafter on held-out prompts: accepted length, acceptance by position, tokens/s beside plain decoding.

  python -m train.evaluate
  python -m train.evaluate --drafter=runs/quickstart --sets=chat --count=5 --noplain
  python -m train.evaluate --block_length=3 --execution=sequential --out=runs/short.json

Prompts are decoded one by one, each first for two untimed steps, so that compilation is not measured. "accepted length"
is tokens per round: the accepted drafts and one of the target's own. "position t" is the share of rounds that accepted
draft t, among those that accepted all drafts before it. "identical" counts the prompts with the same tokens both ways.
"""

import json
import pathlib
import statistics

from absl import flags

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
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Sampling temperature; 0 takes the likeliest token.", lower_bound=0.0
)
_EXECUTION = flags.DEFINE_enum(
    "execution", None, EXECUTIONS, "How blocks are drafted; what the drafter declares if unset."
)
_BLOCK_LENGTH = flags.DEFINE_integer("block_length", None, "Drafts a block; what the drafter was trained for if unset.")
_PLAIN = flags.DEFINE_bool("plain", True, "Decode every prompt without the drafter too; --noplain takes half the time.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the results.")


def main():
    # What can be wrong is found before anything takes long.
    sets = {name: sources.evaluation_prompts(name, _COUNT.value) for name in _SETS.value}
    if not sets:
        raise ValueError(f"--sets: empty; allowed: some of {', '.join(sources.EVALUATION_SOURCES)}")
    measure.check_drafter(_DRAFTER.value)
    if _OUT.value:
        pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
    target = measure.load_target(_TARGET.value)
    drafter = measure.load_drafter(_DRAFTER.value, target, _BLOCK_LENGTH.value)

    measured = {
        name: measure.evaluate(
            target,
            drafter,
            [target.tokenizer.chat(prompt.messages) for prompt in prompts],
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            execution=_EXECUTION.value,
            plain=_PLAIN.value,
            description=name,
        ).as_dict()
        for name, prompts in sets.items()
    }
    mean = mean_of(list(measured.values()))
    machine = measure.machine()
    print(report(measured, mean))
    print(f"\nmeasured on: {', '.join(f'{name} {value}' for name, value in machine.items())}")
    if _OUT.value:
        settings = {
            "target": _TARGET.value,
            "drafter": _DRAFTER.value,
            "execution": _EXECUTION.value or drafter.config.execution,
            "block_length": drafter.config.block_length,
            "max_new_tokens": _MAX_NEW_TOKENS.value,
            "temperature": _TEMPERATURE.value,
        }
        results = {"settings": settings, "machine": machine, "sets": measured, "mean": mean}
        pathlib.Path(_OUT.value).write_text(json.dumps(results, indent=2) + "\n")


def mean_of(sets: list[dict]) -> dict:
    """Every set counts the same. `sets` are `Measurement.as_dict()`; counts and what was not measured are left out."""
    names = ("accepted_length", "tokens_per_second", "plain_tokens_per_second", "ratio")
    mean = {name: statistics.mean(s[name] for s in sets) for name in names if sets[0][name] is not None}
    by_position = [[share for share in shares if share is not None] for shares in zip(*(s["acceptance"] for s in sets))]
    return mean | {"acceptance": [statistics.mean(shares) if shares else None for shares in by_position]}


def report(sets: dict[str, dict], mean: dict) -> str:
    """The table that is printed: one line a set, then their mean."""
    positions = [f"position {t + 1}" for t in range(len(mean["acceptance"]))]
    header = ["set", "accepted length", *positions, "tokens/s", "plain tokens/s", "ratio", "identical"]
    rows = []
    for name, values in [*sets.items(), ("mean", mean)]:
        identical = values.get("identical")
        rows.append([
            name,
            _number(values["accepted_length"], 3),
            *(_number(share, 2) for share in values["acceptance"]),
            _number(values["tokens_per_second"], 1),
            _number(values.get("plain_tokens_per_second"), 1),
            _number(values.get("ratio"), 2),
            "-" if identical is None else f"{identical}/{values['prompts']}",
        ])
    return measure.table(header, rows)


def _number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    command_line.run(main)
