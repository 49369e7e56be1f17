"""Calibrates the confidence head of a drafter on rounds of real decoding, and says how far it can be believed.

  python -m train.calibrate --drafter=runs/quickstart --out=runs/calibrated
  python -m train.calibrate --drafter=DIR --out=DIR --count=60 --rounds=runs/rounds.npz      (into the same directory)

Held-out prompts are decoded with all drafts put to verification. One temperature a position is fitted, from left to right,
on the rounds of one half of the prompts, and judged on those of the other half. --out gets the drafter with its
temperatures, calibration.json and reliability.png. --rounds keeps the rounds, for train.simulate and for the next time:
prompts that are in the file already are not decoded again.

"ECE" is the expected calibration error of the chance that a draft survives, in 20 bins of equal width; "AUC" how well it
tells drafts that survive from those that do not (0.5: not at all); "Brier" its mean squared error. "before" is without
temperatures.
"""

import dataclasses
import json
import pathlib

import numpy as np
from absl import flags

import dspark_jax as ds
from dspark_jax import calibration, loading
from dspark_jax.checkpoints import huggingface
from dspark_jax.data import sources
from dspark_jax.drafter import EXECUTIONS
from train import command_line, measure, plots
from train import rounds as rounds_lib

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Who verifies: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: the directory of a saved drafter or of a training run."
)
_OUT = flags.DEFINE_string("out", None, "Directory for the calibrated drafter; that of --drafter is allowed.", required=True)
_ROUNDS = flags.DEFINE_string("rounds", None, "File (.npz) to keep the rounds in, and to go on from.")
_SETS = flags.DEFINE_list("sets", list(sources.EVALUATION_SOURCES), "Which prompts.")
_COUNT = flags.DEFINE_integer("count", 60, "How many prompts of each set.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Sampling temperature of the rounds; 0 takes the likeliest token.", lower_bound=0.0
)
_EXECUTION = flags.DEFINE_enum(
    "execution", None, EXECUTIONS, "How blocks are drafted; what the drafter declares if unset."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Prompts decoded together.", lower_bound=1)
_PLOT = flags.DEFINE_bool("plot", True, "Draw the reliability diagram, which needs matplotlib.")


def main():
    # What can be wrong is found before anything takes long.
    prompts = [prompt for name in _SETS.value for prompt in sources.evaluation_prompts(name, _COUNT.value)]
    if not prompts:
        raise ValueError(f"--sets: empty; allowed: some of {', '.join(sources.EVALUATION_SOURCES)}")
    measure.check_drafter(_DRAFTER.value)
    if _PLOT.value:
        plots.check()
    out = pathlib.Path(_OUT.value)
    check_out(out)
    for directory in (out, pathlib.Path(_ROUNDS.value or _OUT.value).parent):
        directory.mkdir(parents=True, exist_ok=True)
    target = measure.load_target(_TARGET.value)
    drafter = ds.load_drafter(_DRAFTER.value, target)
    if drafter.owns_tables:
        raise ValueError(f"--drafter: {_DRAFTER.value} has an embedding of its own, which no layout with temperatures holds")

    rounds = rounds_lib.collect(
        target, drafter, prompts, _ROUNDS.value, batch_size=_BATCH_SIZE.value, max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value, execution=_EXECUTION.value)
    temperatures, before, after = calibrate(rounds)
    config = dataclasses.replace(drafter.config, confidence_temperatures=tuple(temperatures.tolist()))
    ds.save_drafter(dataclasses.replace(drafter, config=config), out)
    print(report(temperatures, before, after))
    machine = measure.machine()
    fitted, judged = rounds.halves()
    prompts_of = lambda half: len(np.unique(half.prompt))
    print(f"\nfitted on {len(fitted)} rounds of {prompts_of(fitted)} prompts, judged on {len(judged)} of "
          f"{prompts_of(judged)} others: {_OUT.value}")
    if _PLOT.value:
        plots.reliability_diagram(out / "reliability.png", before, after)
    results = {
        "settings": {"target": _TARGET.value, "drafter": _DRAFTER.value} | {
            name: rounds.settings[name] for name in ("execution", "max_new_tokens", "temperature")},
        "machine": machine,
        "rounds": {"fitted": len(fitted), "judged": len(judged)},
        "temperatures": temperatures.tolist(),
        "before": [_plain(row) for row in before],
        "after": [_plain(row) for row in after],
    }
    (out / "calibration.json").write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")


def check_out(out: pathlib.Path) -> None:
    """Raises ValueError where ``out`` holds something that a drafter must not be written over."""
    if loading.is_run(out):
        raise ValueError(f"--out: {out} is a training run; allowed: a new directory, or one of a saved drafter")
    if (out / "config.json").exists():
        try:
            huggingface.read_config(out / "config.json")
        except ValueError as error:
            raise ValueError(f"--out: holds a model of another layout ({error}); allowed: a new directory") from None


def calibrate(rounds: rounds_lib.Rounds) -> tuple[np.ndarray, list[dict], list[dict]]:
    """-> temperatures [T] of one half of the prompts, and `calibration.by_position` of the other half, before and after.

    Raises: ValueError where there are too few rounds.
    """
    fitted, judged = rounds.halves()
    if min(len(fitted), len(judged)) < calibration.BINS:
        raise ValueError(f"rounds: {len(fitted)} of one half of the prompts and {len(judged)} of the other; each needs at "
                         f"least as many as bins, {calibration.BINS}: decode more prompts (--count)")
    temperatures = calibration.fit_sequential_temperatures(fitted.confidence, fitted.accepted, fitted.proposed)
    measured = (judged.confidence, judged.accepted)
    before = calibration.by_position(*measured, proposed=judged.proposed)
    return temperatures, before, calibration.by_position(*measured, temperatures, judged.proposed)


def report(temperatures, before: list[dict], after: list[dict]) -> str:
    """The table that is printed: one line a position, then their means."""
    header = ["draft", "temperature", "rounds", "survived", "ECE before", "ECE after", "AUC", "Brier before", "Brier after"]
    rows = [
        [str(t + 1), f"{temperature:.3f}", str(new["count"]), f"{new['observed']:.3f}", f"{100 * old['ece']:.2f} %",
         f"{100 * new['ece']:.2f} %", f"{new['auc']:.3f}", f"{old['brier']:.4f}", f"{new['brier']:.4f}"]
        for t, (temperature, old, new) in enumerate(zip(temperatures, before, after))]
    mean = lambda values, name: np.mean([row[name] for row in values])
    rows.append(["mean", "", "", "", f"{100 * mean(before, 'ece'):.2f} %", f"{100 * mean(after, 'ece'):.2f} %",
                 f"{mean(after, 'auc'):.3f}", f"{mean(before, 'brier'):.4f}", f"{mean(after, 'brier'):.4f}"])
    return measure.table(header, rows)


def _plain(row):
    """Of values and arrays, what JSON can hold; NaN becomes null."""
    known = lambda x: None if np.isnan(x) else x
    return row | {
        "auc": known(row["auc"]),
        "reliability": {name: [known(x) for x in values.tolist()] for name, values in row["reliability"]._asdict().items()}}


if __name__ == "__main__":
    command_line.run(main)
