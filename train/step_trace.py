"""A profile of some training steps, for TensorBoard's profile page, xprof or Perfetto."""

import re

import jax


class StepTrace:
    """Traces the steps that ``steps`` names into ``directory``; `before` and `after` stand around every step.

    steps: "10:15" (steps 10 to 14, counted from 0), "5" (five steps, the third of this start and those after it, so that
    nothing compiles in between), or None. Raises ValueError for anything else.
    """

    def __init__(self, steps, start, directory):
        self.directory, self.active, self.steps = directory, False, range(0)
        if steps is None:
            return
        found = re.fullmatch(r"(?:(\d+):)?(\d+)", str(steps))
        first = int(found[1]) if found and found[1] else start + 2
        self.steps = range(first, int(found[2]) + (0 if found[1] else first)) if found else range(0)
        if not self.steps:
            raise ValueError(f"profile: {steps!r}; must be a number of steps such as 5, or the first and the one after "
                             "the last such as 10:15")

    def before(self, step):
        if step in self.steps and not self.active:
            jax.profiler.start_trace(str(self.directory))
            self.active = True

    def after(self, step, arrays):
        """arrays: what the step returned; the trace ends when they are there."""
        if self.active and step + 1 not in self.steps:
            jax.block_until_ready(arrays)
            self.close()

    def close(self):
        if self.active:
            jax.profiler.stop_trace()
            self.active = False
