"""Tables and pictures of what `experiments.measure` found.

  python -m experiments.tables --out=experiments/RESULTS.md --pictures=experiments
  python -m experiments.tables                                    (prints the tables)

Cells that were not measured yet are named on stderr, stand as "-", and the program ends with code 1.
"""

import json
import pathlib
import sys

from absl import flags

from experiments import results as results_lib
from experiments import six
from train import command_line, plots

_FOLDER = flags.DEFINE_string(
    "folder", str(pathlib.Path(__file__).parent), "Where greedy.json, sampled.json and times.json lie.")
_OUT = flags.DEFINE_string("out", None, "Markdown file for the tables; they are printed by default.")
_PICTURES = flags.DEFINE_string("pictures", None, "Directory for the pictures.")
_EARLIER = flags.DEFINE_integer("earlier_positions", 3_276_800, "Positions that the common backbone's beginning was trained on.")


def main():
    folder = pathlib.Path(_FOLDER.value)
    results = results_lib.Results.read(folder)
    if _PICTURES.value:
        plots.check()
    text = report(results, machine_of(folder))
    if _OUT.value:
        pathlib.Path(_OUT.value).write_text(text)
    else:
        print(text)
    if _PICTURES.value:
        from experiments import pictures

        pictures.draw(results, curve(results), pathlib.Path(_PICTURES.value))
    for name in results.missing:
        print(f"missing: {name}", file=sys.stderr)
    if results.missing:
        sys.exit(1)


def machine_of(folder):
    for part in results_lib.PARTS:
        if (folder / f"{part}.json").exists():
            return json.loads((folder / f"{part}.json").read_bytes())["machine"]
    raise FileNotFoundError(f"{folder}: no greedy.json, nor any other file of cells; see experiments/README.md")


def curve(results):
    options = six.get_config("backbone")
    return results_lib.learning_curve(
        results, _EARLIER.value, options.batch.sequences * options.batch.anchors * options.drafter.block_length)


def report(results, machine):
    """All tables, each with its heading."""
    parts = ["# Six drafters, one budget", (
        "What is measured and with which commands is said in README.md of this folder, which also says what these tables mean; "
        f"this file is written by `experiments.tables`. Machine: {', '.join(f'{k} {v}' for k, v in machine.items())}.")]
    for part, temperature in (("greedy", 0), ("sampled", 1)):
        parts += [f"## Accepted length, temperature {temperature}", results_lib.markdown(results_lib.of_drafters(results, part)),
                  f"## Acceptance by position, temperature {temperature}",
                  results_lib.markdown(results_lib.by_position(results, part))]
    parts += ["## A head trained over the whole vocabulary, run on a lattice",
              results_lib.markdown(results_lib.implication_1(results))]
    for name in results_lib.SWEPT:
        fewest = results_lib.loses_at_most(results, name)
        said = "more than 64" if fewest is None else f"{fewest} or more"
        parts += [f"## {results_lib.TITLES[name]}: candidates, without retraining",
                  results_lib.markdown(results_lib.implication_2(results, name)),
                  f"At temperature 0 at most 1 % is lost with {said} candidates."]
    parts += ["## What the candidates hold", results_lib.markdown(results_lib.head_room(results)),
              "## Token rule and block rule, temperature 1", results_lib.markdown(results_lib.rules(results)),
              "## Block length", results_lib.markdown(results_lib.block_lengths(results)),
              "## Learning curve of the common backbone (DFlash)", results_lib.markdown(
                  [["positions trained", "accepted length, temperature 0", "95 %"],
                   *([f"{positions:,}", results_lib.number(length), results_lib.interval(length)]
                     for positions, length in curve(results))])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    command_line.run(main)
