"""What a run leaves to read: metrics.jsonl, TensorBoard, and the table at its end.

metrics.jsonl has one JSON line a logged step, {"step": steps done, "loss": ..., ...}, and one of its own each time that
held-out prompts were decoded, {"step": ..., "held_out_accepted_length": ...}. TensorBoard has the same numbers. With
several processes the first one writes.
"""

import json
import statistics

import jax
import tensorboardX

from dspark_jax.whole_files import replacing
from train import measure

FILE = "metrics.jsonl"
HELD_OUT = "held_out_accepted_length"
LAST = 10  # logged steps that the table is the mean of
FIGURES = {"loss": "loss", "accept_rate": "accept rate", "expected_accepted_length": "expected accepted length",
           "positions_per_second": "positions/s"}


class MetricsLog:
    """The log of a run in ``workdir`` that goes on after ``start`` steps. Lines of steps that are run again are dropped.

    ``held_out``: {steps done: accepted length on held-out prompts} so far; also from an earlier start of the run.
    """

    def __init__(self, workdir, start):
        lines = [line for line in read(workdir) if line["step"] <= start]
        self.held_out, self.file, self.board = held_out(lines), None, None
        if jax.process_index() == 0:
            with replacing(workdir / FILE, "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            self.file = open(workdir / FILE, "a")
            self.board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.file is not None:
            self.file.close()
            self.board.close()

    def write(self, step, values):
        """values: {name: a number or a list of numbers} after ``step`` steps."""
        line = {"step": step, **values}
        self.held_out |= held_out([line])
        if self.file is None:
            return
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for name, value in values.items():
            for i, v in enumerate(value if isinstance(value, list) else [value]):
                self.board.add_scalar(f"train/{name}@{i}" if isinstance(value, list) else f"train/{name}", v, step)


def held_out(lines) -> dict:
    """{steps done: accepted length on held-out prompts}."""
    return {line["step"]: line[HELD_OUT] for line in lines if HELD_OUT in line}


def read(workdir) -> list[dict]:
    """The lines of a run's log; none where it has none yet."""
    path, lines = workdir / FILE, []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            line["step"] += 0
            lines.append(line)
        except (ValueError, KeyError, TypeError):
            pass  # the last line of a killed run can be cut off
    return lines


def table(lines) -> str:
    """The end of a run as text: means over the last logged steps, and how many batches had nothing to train on."""
    logged = [line for line in lines if "loss" in line]
    if not logged:
        return "no step was logged"
    steps = [line for line in logged if line.get("blocks", 1)][-LAST:]  # a skipped batch says nothing
    rows = []
    for name, title in FIGURES.items():
        values = [line[name] for line in steps if name in line]
        by_position = values and isinstance(values[0], list)
        for i, column in enumerate(zip(*values) if by_position else [values]):
            if column:
                rows.append([f"{title}, position {i + 1}" if by_position else title, f"{statistics.mean(column):.3f}"])
    rows.append(["skipped batches", f"{logged[-1].get('skipped', 0)}"])
    return measure.table([f"after {logged[-1]['step']} steps", f"mean of the last {len(steps)} logged"], rows)
