"""What a compiled program is said to do: against programs whose work is known, and a recipe for a TPU pod."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import program
from train import hlo

ROOT = pathlib.Path(__file__).parents[1]
needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu, TPU's compiler")


# ---------------------------------------------------------------------------------------------------- reading a program


def text_of(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_products_in_a_loop_count_as_often_as_it_runs():
    def f(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=7)[0] @ w

    found = hlo.work(text_of(f, (32, 64), (64, 64)), 1)
    assert sum(found.flops.values()) == 8 * 2 * 32 * 64 * 64


def test_batched_products():
    found = hlo.work(text_of(lambda a, b: jnp.einsum("bhqc,bhkc->bhqk", a, b), (2, 3, 40, 8), (2, 3, 50, 8)), 1)
    assert sum(found.flops.values()) == 2 * 2 * 3 * 40 * 50 * 8


def test_memory_traffic_of_a_loop_over_slices():
    """Each turn reads a row of a large array and adds it up: the array is read once in all, not once a turn."""
    rows, width = 64, 1 << 14
    text = text_of(lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(width), x)[0], (rows, width))
    found = sum(hlo.work(text, 1).bytes.values())
    assert rows * width * 4 <= found < 5 * rows * width * 4


TPU_LINES = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
%body (state: (s32[], bf16[8,256])) -> (s32[], bf16[8,256]) {
  %state = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %all-reduce = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), replica_groups=mesh['a'=4,'b'=4] {'b'}, to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[8,256]) tuple(%next, %all-reduce)
}
%condition (state: (s32[], bf16[8,256])) -> pred[] {
  %state = (s32[], bf16[8,256]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}
ENTRY %main (x: bf16[8,256], w: bf16[4,256,32]) -> bf16[8,256] {
  %x = bf16[8,256]{1,0} parameter(0)
  %w = bf16[4,256,32]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[8,256]) tuple(%zero, %x)
  %loop = (s32[], bf16[8,256]) while(%start), condition=%condition, body=%body
  %gather = bf16[32,256]{1,0} all-gather(%x), replica_groups=[4,4]<=[16], dimensions={0}
  %scatter = bf16[4,256]{1,0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
  %h = bf16[4,8,256]{2,1,0} broadcast(%x), dimensions={1,2}
  %product = bf16[4,8,32]{2,1,0} convolution(%h, %w), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf
  %sorted = f32[8,300]{1,0} sort(%x), dimensions={1}, to_apply=%add
  ROOT %out = bf16[8,256]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_lines_of_a_tpu_program():
    """Groups in their three spellings, a loop whose end is in its condition, a batched product as a convolution."""
    found = hlo.work(TPU_LINES, 16)
    size = 8 * 256 * 2
    assert {(c.kind, c.group, c.count, c.bytes, c.wire) for c in found.collectives} == {
        ("all-reduce", 4, 5, 5 * size, 5 * 2 * size * 3 // 4),
        ("all-gather", 4, 1, 4 * size, 4 * size * 3 // 4),
        ("reduce-scatter", 2, 1, size, size // 2)}
    assert found.flops == {"": 4 * 2 * 8 * 32 * 256}
    assert found.sorts == [300] and found.gathers == [(32, 256)]


# ------------------------------------------------------------------------------------------------------------ the recipe

VOCABULARY, TENSOR = 49_152, 4

REPORT = """
import json, sys
import jax
from configs import smollm2
from train import compile
from dspark_jax import candidates

config = smollm2.get_config()
config.mesh = {"data": 2, "fsdp": 2, "tensor": 4}
config.drafter.draft_vocab_size = 49_152
config.loss.candidates = 0.5
if sys.argv[1] == "plain":  # of whole rows, however they lie
    candidates.over_mesh = lambda *_: lambda logits, M: jax.lax.top_k(logits, M)[::-1]
_, devices = compile.find_topology("v5e:4x4")
found = compile.report("step", config, devices)
print(json.dumps({"sorts": found.work.sorts, "moved": [c.array for c in found.work.collectives],
                  "flops": found.work.flops, "total": found.total}))
"""


@functools.cache
def compiled(way):
    """In a process of its own, since libtpu must find neither a TPU nor a jax that has already looked for one."""
    result = program.run(REPORT, way, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def logits_moved(found):
    """What goes between chips and is as wide as a chip's part of the vocabulary: gathered, or dealt out by position, as
    the compiler would rather. Tables have the vocabulary first."""
    shapes = {array: array[array.index("[") + 1:-1].split(",") for array in found["moved"]}
    return [array for array, shape in shapes.items() if len(shape) > 2 and int(shape[-1]) >= VOCABULARY // TENSOR]


@needs_libtpu
@pytest.mark.slow
def test_recipe_moves_no_logits_and_sorts_no_vocabulary():
    found = compiled("sharded")
    assert found["moved"] and not logits_moved(found), found["moved"]
    assert max(found["sorts"]) < VOCABULARY // TENSOR / 8
    assert found["flops"]["heads and loss"] > 0 and found["total"] < 16e9


@needs_libtpu
@pytest.mark.slow
def test_top_k_of_whole_rows_does_both():
    """The same questions of a step that takes `jax.lax.top_k` of its logits: the test above can fail."""
    found = compiled("plain")
    assert logits_moved(found) and max(found["sorts"]) >= VOCABULARY // TENSOR


# ----------------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize("arguments, message", [
    (["--topology=v7:4x4"], "--topology: 'v7:4x4'; allowed: v5e or v6e, a colon and a grid such as 4x4"),
    (["--topology=v5e:4"], "--topology: 'v5e:4'; allowed:")])
def test_topology_that_there_is_not(arguments, message):
    result = program.run_module("train.compile", "--config=configs/smollm2.py", *arguments)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu():
    result = program.run_module("train.compile", "--config=configs/smollm2.py", "--topology=v5e:4x4")
    assert result.returncode == 2 and "libtpu, which is not installed" in result.stderr
    assert len(result.stderr.splitlines()) == 1
