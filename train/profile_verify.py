"""Measures how the time of a decoding step grows with the tokens that are verified in it: the curve the scheduler needs.

  python -m train.profile_verify --rows=8 --out=runs/capacity.json
  python -m train.profile_verify --rows=32 --context=512 --repeats=30 --out=runs/capacity.json

A step of --rows requests drafts for each of them and has the target process b tokens of all of them together, at the sizes
that decoding is compiled for, and at 1, 2, 4, ... for fewer requests. What is written holds the seconds of each size, of
drafting, and the steps per second for every b from 1 to rows * (drafts a block + 1). train.simulate takes it as --profile.
Leave the machine alone meanwhile.
"""

import functools
import pathlib
import time

import jax
import jax.numpy as jnp
from absl import flags

import dspark_jax as ds
from dspark_jax import cache as kv
from dspark_jax import decoding, sampling
from dspark_jax.drafter import propose
from dspark_jax.target import Decoder, Ragged
from train import capacity as capacity_lib
from train import command_line, measure

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Who verifies: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: the directory of a saved drafter or of a training run."
)
_OUT = flags.DEFINE_string("out", None, "JSON file for the curve.", required=True)
_ROWS = flags.DEFINE_integer("rows", 8, "Requests decoded together.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 256, "Tokens of each request that are in the caches already.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Steps of each size that are timed; their median counts.", lower_bound=1)


def main():
    measure.check_drafter(_DRAFTER.value)
    pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
    target = measure.load_target(_TARGET.value)
    drafter = ds.load_drafter(_DRAFTER.value, target)
    rows, T = _ROWS.value, drafter.config.block_length
    if _CONTEXT.value + T + 1 > target.config.max_position_embeddings:
        raise ValueError(f"--context: {_CONTEXT.value}; with a block it exceeds the target's context of "
                         f"{target.config.max_position_embeddings}")
    smaller = [2**i for i in range(rows.bit_length()) if 2**i < rows]
    buckets = [*smaller, *decoding.buckets(rows, T)]
    seconds = capacity_lib.bucket_seconds(verify_step(target, rows, T, _CONTEXT.value), buckets, _REPEATS.value)
    (drafting,) = capacity_lib.bucket_seconds(draft_step(drafter, rows, _CONTEXT.value), [rows], _REPEATS.value)
    machine = measure.machine()
    made_on = ", ".join(f"{name} {value}" for name, value in machine.items())
    capacity = capacity_lib.measured(buckets, seconds, drafting, rows, f"measured, {rows} requests, {made_on}")
    capacity_lib.save(capacity, _OUT.value, machine=machine, rows=rows, block_length=T, context=_CONTEXT.value,
                      repeats=_REPEATS.value, buckets=buckets, verify_seconds=seconds, draft_seconds=drafting)
    table = [[str(b), f"{1000 * s:.2f}", f"{capacity.steps_per_second[b]:.2f}"] for b, s in zip(buckets, seconds)]
    print(measure.table(["tokens", "verify ms", "steps/s with drafting"], table))
    print(f"\ndrafting for {rows} requests: {1000 * drafting:.2f} ms\n{capacity.source}")


def verify_step(target, rows, block_length, context):
    """-> step(tokens), the seconds in which the target processes so many tokens of ``rows`` requests, of as many as there
    are tokens where these are fewer, and gives their next-token laws. ``context`` tokens of each are in the cache."""
    c, Q = target.config, block_length + 1
    dtype = jnp.result_type(*jax.tree.leaves(target.params))

    @functools.partial(jax.jit, static_argnames=("tokens",), donate_argnames=("cache",))
    def run(params, cache, tokens):
        B = cache[0][0].shape[0]
        places = Ragged.of(tokens // B + (jnp.arange(B) < tokens % B), Q, tokens)
        hidden, _, cache = Decoder(c).apply(
            {"params": params}, jnp.zeros(tokens, jnp.int32), context + places.slots, cache, (), places)
        logits = Decoder(c).apply({"params": params}, hidden, method=Decoder.logits)
        return sampling.probabilities(logits, jnp.float32(1), 0, 1.0), cache

    def step(tokens):
        cache = kv.empty_cache(
            c.num_hidden_layers, min(rows, tokens), context + Q, c.num_key_value_heads, c.head_dim, dtype)
        return _timed(run, target.params, cache, tokens)

    return step


def draft_step(drafter, rows, context):
    """-> step(rows), the seconds in which blocks are drafted for so many requests."""
    c, b = drafter.config, drafter.config.backbone
    dtype = jnp.result_type(*jax.tree.leaves(drafter.params["backbone"]))
    candidates = c.usable_candidates if c.execution == "lattice" else None

    @jax.jit
    def run(arrays, cache, keys):
        anchors, starts = jnp.zeros(rows, jnp.int32), jnp.full(rows, context)
        return propose(c, arrays["params"], arrays["embedding"], arrays["head_rows"], arrays["draft_to_target"], cache,
                       anchors, starts, keys, jnp.ones(rows), c.execution, candidates,
                       text=jnp.zeros((rows, context + 1), jnp.int32))

    cache = kv.empty_cache(b.num_hidden_layers, rows, context, b.num_key_value_heads, b.head_dim, dtype)
    return lambda rows: _timed(run, drafter.arrays(), cache, jax.random.split(jax.random.key(0), rows))


def _timed(run, *arguments):
    jax.block_until_ready(arguments[:-1])
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - began


if __name__ == "__main__":
    command_line.run(main)
