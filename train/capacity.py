"""How many steps a second a machine makes, by the number of tokens that go through the target: measured, or given.

Given curves are what a text-book accelerator would do; every result that rests on one says so.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from dspark_jax import scheduling, simulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """``steps_per_second``, entry b for a step that verifies b tokens, drafting included; ``plain_steps_per_second``, of
    steps without drafting, entry b for b requests; ``source``: which machine, or that the curve is given."""

    steps_per_second: np.ndarray
    plain_steps_per_second: np.ndarray
    source: str


def bucket_seconds(step: Callable[[int], float], buckets: Sequence[int], repeats: int) -> list[float]:
    """Median seconds of each bucket. step(tokens) -> seconds of one step over so many tokens.

    Every bucket is run once untimed, which compiles it; then all of them in turn, so that whatever else the machine does
    meets all alike.
    """
    for tokens in buckets:
        step(tokens)
    times = [[step(tokens) for tokens in buckets] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times)]


def measured(buckets, verify_seconds, draft_seconds: float, rows: int, source: str) -> Capacity:
    """From the seconds of each bucket, and of drafting for ``rows`` requests. Raises ValueError."""
    seconds, tokens = np.asarray(verify_seconds), max(buckets)
    return Capacity(
        steps_per_second=scheduling.table_from_buckets(buckets, 1 / (seconds + draft_seconds), tokens),
        plain_steps_per_second=scheduling.table_from_buckets(buckets, 1 / seconds, rows), source=source)


CURVES = ("linear", "roofline", "step")


def given(name: str, tokens: int, *, step_seconds: float, knee: float, bucket: int, draft_seconds: float) -> Capacity:
    """A curve of `dspark_jax.simulation`, for up to ``tokens``, with the time of drafting on top. Raises ValueError."""
    for flag, value in (("step_seconds", step_seconds), ("knee", knee), ("bucket", bucket)):
        if value <= 0:
            raise ValueError(f"--{flag}: {value}; must be positive")
    plain, detail = {
        "linear": lambda: (simulation.linear(tokens, step_seconds, knee), ""),
        "roofline": lambda: (simulation.roofline(tokens, step_seconds, knee), ""),
        "step": lambda: (simulation.staircase(tokens, step_seconds, knee, bucket), f" in sizes of {bucket} tokens"),
    }[name]()
    source = f"given, {name}{detail}, {1000 * step_seconds:g} ms a step, knee at {knee:g} tokens"
    return Capacity(steps_per_second=1 / (1 / plain + draft_seconds), plain_steps_per_second=plain, source=source)


def save(capacity: Capacity, path, **details) -> None:
    """As JSON, with ``details`` beside it."""
    tables = {name: getattr(capacity, name).tolist() for name in ("steps_per_second", "plain_steps_per_second")}
    pathlib.Path(path).write_text(json.dumps({"source": capacity.source, **details, **tables}, indent=2) + "\n")


def load(path) -> Capacity:
    """What `save` wrote. Raises FileNotFoundError, or ValueError that begins with the path."""
    try:
        data = json.loads(pathlib.Path(path).read_text())
        capacity = Capacity(steps_per_second=np.array(data["steps_per_second"], np.float64),
                            plain_steps_per_second=np.array(data["plain_steps_per_second"], np.float64),
                            source=str(data["source"]))
        scheduling.check_steps_per_second(capacity.steps_per_second, 1)
        scheduling.check_steps_per_second(capacity.plain_steps_per_second, 1)
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no capacity curve ({error})") from None
    return capacity
