"""What the draft head compiles to for a TPU pod, of which only the compiler (libtpu) is needed.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python tests/tpu_head.py [way [part]]

compiles it for v5e:4x4, the batch laid out 4 ways and the vocabulary 4 ways, with each way to choose the candidates,
and prints one line of JSON for each: the widths that are sorted, the shapes that are gathered from other chips, what
else selects, and FLOPs and bytes accessed per chip; of the candidates alone and of the head with them.
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding

from dspark_jax import candidates
from dspark_jax.lattice import lattice_draft
from dspark_jax.layers import table_logits
from dspark_jax.transitions import TRANSITIONS

DATA, TENSOR = 4, 4
B, T, V, D, R, M = 8, 7, 151_936, 1024, 256, 16


def instructions(program, opcode):
    """Of each instruction of that kind: its shapes, each as a list of sizes, and the whole line."""
    for line in program.splitlines():
        found = re.search(rf"= (.*?) {opcode}(?:-start)?\(", line)
        if found:
            shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", found[1])
            yield [[int(n) for n in shape.split(",")] for shape in shapes], line


def report(compiled):
    program, cost = compiled.as_text(), compiled.cost_analysis()
    sorts = [shapes[0][int(re.search(r"dimensions=\{(\d+)\}", line)[1])]
             for shapes, line in instructions(program, "sort")]
    gathers = [shape for shapes, _ in instructions(program, "all-gather") for shape in shapes]
    selections = [name for name in ("TopK", "PartialReduce") if f'custom_call_target="{name}"' in program]
    return {"sorts": sorted(sorts), "gathers": sorted(gathers, key=np.prod), "selections": selections,
            "flops": cost["flops"], "bytes": cost["bytes accessed"]}


def laid(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P(*spec)))


def compile_candidates(mesh, choose):
    """The candidates alone, of logits [B, T, V]."""
    return jax.jit(jax.vmap(lambda x: choose(x, M), spmd_axis_name="data")).lower(
        laid(mesh, (B, T, V), "data", None, "tensor")).compile()


def compile_head(mesh, choose):
    """Base logits, candidates, pair scores and walk of B blocks."""
    transition = TRANSITIONS["context"]
    shapes = transition.parameter_shapes(V, V, D, R)
    params = {name: laid(mesh, shape, *(["tensor"] if shape[0] == V else [])) for name, shape in shapes.items()}
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))

    def head(params, rows, hidden, anchors, keys, temperature):
        draft = lambda u, h, a, k, t: lattice_draft(transition, params, u, h, a, k, t, M, choose=choose)
        logits = jax.lax.with_sharding_constraint(
            table_logits(hidden, rows), NamedSharding(mesh, jax.P("data", None, "tensor")))
        return jax.vmap(draft, spmd_axis_name="data")(logits, hidden, anchors, keys, temperature)

    return jax.jit(head).lower(
        params, laid(mesh, (V, D), "tensor"), laid(mesh, (B, T, D), "data"), laid(mesh, (B,), "data", dtype=jnp.int32),
        laid(mesh, keys.shape, "data", dtype=keys.dtype), laid(mesh, (B,), "data")).compile()


PARTS = {"candidates": compile_candidates, "head": compile_head}


def main(way=None, part=None):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = jax.sharding.Mesh(
        np.array(devices).reshape(DATA, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    ways = {
        "top_k": lambda x, M: jax.lax.top_k(x, M)[::-1],
        "two_stage": candidates.top_candidates,
        "approximate": candidates.approximate_candidates,
        "sharded": candidates.over_mesh(mesh, "tensor"),
    }
    for name in [way] if way else ways:
        for what in [part] if part else PARTS:
            print(json.dumps({"way": name, "part": what} | report(PARTS[what](mesh, ways[name]))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
