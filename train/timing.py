"""Wall-clock times of programs that take turns, so that whatever else the machine does meets all of them alike."""

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

FEWEST = 5  # timed calls of a slow program
READ = 1 << 28  # bytes that `memory_reads` read: far more than caches hold


def alternate(calls, repeats, budget=math.inf, settle=False, description=None) -> dict[str, dict]:
    """Times ``calls``, {name: function without arguments}, one after the other, over and over -> {name: `summary`}.

    Every call is made untimed first, which compiles it. The clock stops when the arrays that it returns are there.

    Args:
      repeats: timed calls of each.
      budget: seconds; what would take longer in all is called less often, spread over the same time, `FEWEST` times or
        ``repeats`` if that is less.
      settle: before each timed call make an untimed one, so that a program finds its data where its own last call left
        them and not where another's did. Without, the order of ``calls`` decides that: for the parts of something
        larger it should be their order there.
      description: label of a progress bar; None shows none.
    """
    counts = {}
    for name, call in calls.items():
        seconds(call)
        counts[name] = min(repeats, max(FEWEST, int(budget / seconds(call)))) if budget < math.inf else repeats
    times = {name: [] for name in calls}
    for i in tqdm.trange(repeats, desc=description, disable=description is None, leave=False, dynamic_ncols=True):
        for name, call in calls.items():
            if (i + 1) * counts[name] // repeats == i * counts[name] // repeats:
                continue
            if settle:
                seconds(call)
            times[name].append(seconds(call))
    return {name: summary(t) for name, t in times.items()}


def seconds(call) -> float:
    """Of one call, until the arrays that it returns are there."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def summary(times) -> dict:
    """Median and quartiles of some seconds, and how many there are."""
    low, median, high = (float(q) for q in np.quantile(times, (0.25, 0.5, 0.75)))
    return {"median": median, "lower_quartile": low, "upper_quartile": high, "repeats": len(times)}


def cell(times, digits=2) -> str:
    """A `summary` in a table: "median (lower quartile-upper quartile)" in milliseconds."""
    median, low, high = (1e3 * times[name] for name in ("median", "lower_quartile", "upper_quartile"))
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def memory_reads() -> dict:
    """Programs for `alternate` that read `READ` bytes and write next to nothing.

    Which of them reads fastest depends on the machine, and `memory_rate` believes the fastest.
    """
    x, ones = jnp.ones((READ // 4096, 1024), jnp.float32), jnp.ones(1024, jnp.float32)
    forms = {"sum": jnp.sum, "sum of rows": lambda x: jnp.sum(x, axis=1), "product": lambda x: x @ ones}
    return {name: functools.partial(jax.jit(form), x) for name, form in forms.items()}


def memory_rate(times) -> float:
    """Bytes per second of the fastest of `memory_reads`: {name: `summary`} of them."""
    return READ / min(t["median"] for t in times.values())
