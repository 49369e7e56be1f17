"""Where the time of one pass of the target goes on a CPU: products, copies, and everything else.

  python -m train.profile_step
  python -m train.profile_step --tokens=1,8 --batch=8 --out=runs/profile.json

Passes of the target over a few tokens of each row, as a plain step (1) and as a round verifies its block, behind a cache
of 256 positions. Each is timed without a profiler, then profiled; what XLA ran is added up by what it is: "products" are
matrix products, the ones of attention too, "copies" move the cache or an operand, "others" is the rest. They can add up to
more than the time of a pass where operations run side by side.
"""

import functools
import json
import os
import pathlib
import tempfile

# Read when jax starts; without it a profile of a CPU holds no operations.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_xprof_traceme=true".strip()

import jax
import jax.numpy as jnp
from absl import flags

from dspark_jax import cache as kv
from dspark_jax import decoding
from train import benchmark_decode, command_line, measure, operations, timing

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Whose passes: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_TOKENS = flags.DEFINE_list("tokens", ["1", "4", "5", "8"], "Tokens of each row in a pass.")
_BATCH = flags.DEFINE_integer("batch", 1, "Rows.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed passes, and profiled ones.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "JSON file for the results.")

CACHE = 256


def main():
    tokens = command_line.whole_numbers(_TOKENS)
    if _OUT.value:
        pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
    target = measure.load_target(_TARGET.value)
    passes = {str(n): compile_pass(target, _BATCH.value, n) for n in tokens}
    times = timing.alternate({name: call for name, (call, _) in passes.items()}, _REPEATS.value, settle=True)
    found = {name: {"seconds": times[name], "kinds": profile(*passes[name], _REPEATS.value)} for name in passes}
    print(report(found))
    print(f"\nmeasured on: {', '.join(f'{name} {value}' for name, value in measure.machine().items())}")
    if _OUT.value:
        settings = {"target": _TARGET.value, "batch": _BATCH.value, "cache": CACHE, "repeats": _REPEATS.value}
        pathlib.Path(_OUT.value).write_text(json.dumps(
            {"settings": settings, "machine": measure.machine(), "passes": found}, indent=2) + "\n")


def compile_pass(target, batch, tokens):
    """-> (call, text of the program): the target on [batch, tokens], its logits and their maxima; the cache is donated."""
    options, c = benchmark_decode.options_of(target), target.config

    @functools.partial(jax.jit, donate_argnums=2)
    def run(params, block, cache):
        positions = CACHE // 2 + jnp.broadcast_to(jnp.arange(tokens), block.shape)
        hidden, _, cache = decoding.process(options, params, block, positions, cache)
        return jnp.argmax(decoding.logits_of(options, params, hidden), axis=-1), cache

    dtype = jnp.result_type(*jax.tree.leaves(target.params))
    cache = kv.empty_cache(c.num_hidden_layers, batch, CACHE, c.num_key_value_heads, c.head_dim, dtype)
    block = jnp.zeros((batch, tokens), jnp.int32)
    program = run.lower(target.params, block, cache).compile()

    def call():
        nonlocal cache
        best, cache = program(target.params, block, cache)
        return best, cache

    return call, program.as_text()


def profile(call, text, repeats):
    """{kind: {"operations", "seconds"}} of one call, the mean of ``repeats`` profiled ones."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(call())
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        events = [(event.name, event.duration_ns) for plane in data.planes for line in plane.lines for event in line.events]
    return operations.add_up(events, text, repeats)


def report(found) -> str:
    """The table that is printed: one line a pass."""
    rows = [[name, timing.cell(values["seconds"])] + [
        f"{1e3 * values['kinds'][kind]['seconds']:.2f} ({values['kinds'][kind]['operations']:.0f})" for kind in operations.KINDS]
        for name, values in found.items()]
    return measure.table(["tokens", "pass, ms", *(f"{kind}, ms (operations)" for kind in operations.KINDS)], rows)


if __name__ == "__main__":
    command_line.run(main)
