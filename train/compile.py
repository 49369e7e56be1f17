"""Compile a training recipe for a TPU pod, without a TPU, and say what each of its chips would hold and do.

    pip install -e ".[tpu]"
    python -m train.compile --config=configs/qwen3_8b_dspark.py --topology=v5e:16x16
    python -m train.compile --config=configs/smollm2.py --topology=v5e:4x4 --config.mesh.tensor=4

TPU's own compiler (libtpu) runs here on shapes alone: no weights are read and nothing is executed. Memory, products,
memory traffic and collectives are those of the compiled program; the times are what they take at the speeds of the data
sheet, an estimate that no chip was asked about. The exit code is 1 where a program does not fit.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import re

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies
from ml_collections import config_flags

from dspark_jax import cache as kv
from dspark_jax import candidates, decoding, layers, sharding
from dspark_jax import drafter as drafter_lib
from dspark_jax.checkpoints import targets
from dspark_jax.target import TargetConfig
from train import command_line, features, hlo, loop, programs

_CONFIG = config_flags.DEFINE_config_file("config", None, "Python file with get_config(); see configs/.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", None, "Chip and grid, such as v5e:16x16, v5e:4x4 or v6e:8x8.")
_PARTS = flags.DEFINE_list("parts", ["step", "target", "decode"],
                           "What to compile: step (a training step), target (its forward pass alone), decode (one "
                           "draft-verify round).")
if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])

DECODE_SEQUENCES, DECODE_CONTEXT = 16, 4096  # sequences per group of "tensor" chips that decode, tokens of each
DECODE_TOKENS = 1024  # of the record of a decoding state; costs nothing
GB = 1e9


# What libtpu else asks the machine for, and complains when there is no answer; and it must not claim a TPU for itself.
WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_WORKER_HOSTNAMES": "localhost",
               "TPU_WORKER_ID": "0", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Data sheet: bytes of memory, products/s in bfloat16 (2 operations each), bytes/s of memory and of one link one way,
    and the clock that follows from the second."""

    memory: float
    flops: float
    bandwidth: float
    link: float
    clock: float


CHIPS = {
    "v5e": Chip(16e9, 197e12, 819e9, 45e9, 1.5e9),
    "v6e": Chip(32e9, 918e12, 1640e9, 90e9, 1.75e9),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What one program is to a chip: ``held``, bytes of named arguments; ``temporary`` bytes besides arguments and
    results; ``total``, bytes at the peak; ``work``; None for the last three where it does not fit, and ``refusal``, what
    the compiler then said."""

    name: str
    held: dict[str, int]
    temporary: int | None
    total: int | None
    work: hlo.Work | None
    refusal: str = ""


def main():
    chip, devices = find_topology(_TOPOLOGY.value)
    unknown = set(_PARTS.value) - set(PARTS)
    if unknown:
        raise ValueError(f"--parts: {min(unknown)!r}; allowed: {', '.join(PARTS)}")
    fits = True
    for name in _PARTS.value:
        result = report(name, _CONFIG.value, devices)
        print_report(result, chip, len(devices))
        fits &= result.total is not None and result.total <= chip.memory
    raise SystemExit(0 if fits else 1)


def find_topology(name):
    """-> (`Chip`, the devices) of a name such as "v5e:16x16". Raises ValueError for one that there is not, or without
    libtpu."""
    kind, _, grid = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+x\d+", grid):
        raise ValueError(f"--topology: {name!r}; allowed: {' or '.join(CHIPS)}, a colon and a grid such as 4x4")
    if not importlib.util.find_spec("libtpu"):
        raise ValueError('--topology: needs TPU\'s compiler, libtpu, which is not installed: pip install -e ".[tpu]"')
    jax.config.update("jax_platforms", "cpu")  # nothing here may look for a TPU
    os.environ.update(WITHOUT_TPU)
    try:
        return CHIPS[kind], topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # whatever libtpu raises: a JaxRuntimeError of several kinds
        raise ValueError(f"--topology: {name!r} is none that TPU's compiler knows ({str(error).splitlines()[0]})") from error


def target_config(config):
    """The target's sizes: of config.json in the directory ``config.target``, else of ``config.target_sizes``."""
    directory = pathlib.Path(config.target)
    if (directory / "config.json").is_file():
        return targets.read_config(directory)
    if not config.get("target_sizes"):
        raise ValueError(f"target: {config.target!r} has no config.json, and the config has no target_sizes")
    fields = config.target_sizes.to_dict()
    if fields.get("rope_scaling"):
        fields["rope_scaling"] = layers.RopeScaling(**fields["rope_scaling"])
    return TargetConfig(**fields)


def shaped(mesh, shape, dtype, *axes):
    """A `jax.ShapeDtypeStruct` spread over these axes."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*axes)))


def training_step(config, devices):
    """-> (jitted function, its arguments as shapes, {name: arguments to count})."""
    target = target_config(config)
    model = loop.drafter_config(config.drafter, target)
    drafter_lib.check_fit(model, target)
    mesh = sharding.make_mesh(config.get("mesh", {}), devices)
    program = programs.build(config, model, target, mesh)
    B, S = config.batch.sequences, config.data.get("row_length") or config.data.max_length
    batch = {"tokens": shaped(mesh, (B, S), jnp.int32, sharding.BATCH),
             "loss_mask": shaped(mesh, (B, S), jnp.float32, sharding.BATCH)}
    if config.data.get("row_length"):
        batch["documents"] = shaped(mesh, (B, S), jnp.int32, sharding.BATCH)
    if config.features.cached:
        width = (len(model.target_layer_ids) + 1) * target.hidden_size
        batch["features"] = shaped(mesh, (B, S, width), jnp.bfloat16, sharding.BATCH)
    if programs.has_log_normalizers(config):
        batch["log_normalizers"] = shaped(mesh, (B, S), jnp.float32, sharding.BATCH)
    arguments = program.params, program.opt_state, program.frozen, batch, jax.ShapeDtypeStruct((), jnp.int32)
    held = dict(zip(("parameters", "optimizer state", "target and tables", "batch"), arguments))
    return program.step, arguments, held


def target_forward(config, devices):
    """As `training_step`: the features of the sequences of one micro-step."""
    target, dtype = target_config(config), programs.compute_dtype(config)
    mesh = sharding.make_mesh(config.get("mesh", {}), devices)
    params = programs.laid(mesh, programs.cast({"target": targets.abstract_params(target)}, dtype))
    tokens = shaped(mesh, (config.batch.sequences // config.batch.micro_steps, config.data.max_length), jnp.int32,
                    sharding.BATCH)
    taps = tuple(config.drafter.target_layer_ids)

    def forward(params, tokens):
        return features.rows_of(target, sharding.gather(mesh, params)["target"], tokens, taps)

    jitted = jax.jit(forward, out_shardings=sharding.by_sequence(mesh))
    return jitted, (params, tokens), {"target": params, "tokens": tokens}


def decode_round(config, devices):
    """As `training_step`: one round of a batch of sequences, each group of "tensor" chips with weights of its own."""
    target, dtype = target_config(config), programs.compute_dtype(config)
    model = loop.drafter_config(config.drafter, target)
    tensor = sharding.make_mesh(config.get("mesh", {}), devices).shape["tensor"]
    mesh = sharding.make_mesh({"data": -1, "tensor": tensor}, devices)
    B, T, L, S = DECODE_SEQUENCES * mesh.shape["data"], model.block_length, DECODE_TOKENS, DECODE_CONTEXT
    ours = programs.laid(mesh, programs.cast({"params": drafter_lib.abstract_params(model)}, dtype))
    frozen = programs.laid(mesh, programs.frozen_shapes(config, model, target))
    weights = ours | {name: frozen[name] for name in ("embedding", "head_rows", "draft_to_target")} | {"successors": None}
    params = programs.laid(mesh, programs.cast({"target": targets.abstract_params(target)}, dtype))["target"]
    row = lambda dtype, *shape: shaped(mesh, (B, *shape), dtype, "data")

    def caches(sizes):
        empty = jax.eval_shape(lambda: kv.empty_cache(sizes.num_hidden_layers, B, S, sizes.num_key_value_heads,
                                                      sizes.head_dim, dtype or jnp.float32))
        heads = "tensor" if sizes.num_key_value_heads % tensor == 0 else None
        return jax.tree.map(lambda leaf: shaped(mesh, leaf.shape, leaf.dtype, "data", heads), empty)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    record = shaped(mesh, (L, B), jnp.int32, None, "data")
    sure = shaped(mesh, (L, B, T), jnp.float32, None, "data") if model.confidence else None
    state = decoding.State(
        anchors=row(jnp.int32), starts=row(jnp.int32), target_cache=caches(target), draft_cache=caches(model.backbone),
        keys=shaped(mesh, keys.shape, keys.dtype, "data"), tokens=row(jnp.int32, L + T), produced=row(jnp.int32),
        done=row(jnp.bool_), finite=row(jnp.bool_), rounds=jax.ShapeDtypeStruct((), jnp.int32), accepted=record,
        proposed=record, confidence=sure, earlier=None,
        text=row(jnp.int32, S) if model.copy_length else None)
    request = decoding.Request(row(jnp.float32), jax.ShapeDtypeStruct((), jnp.int32),
                               jax.ShapeDtypeStruct((4,), jnp.int32), {})
    options = decoding.Options(
        target=target, drafter=model, top_k=0, top_p=1.0, execution=model.execution, candidates=model.candidates,
        verification="token", schedule=None, choose=candidates.over_mesh(mesh, "tensor", ("data",)))

    def a_round(target, weights, state, request):
        return decoding.draft_round(options, target, weights, state, request)

    held = {"target": params, "drafter and tables": weights, "caches": (state.target_cache, state.draft_cache)}
    return jax.jit(a_round, donate_argnums=2), (params, weights, state, request), held


PARTS = {"step": training_step, "target": target_forward, "decode": decode_round}


def bytes_on_chip(tree):
    """Bytes of a tree of shapes with shardings on one device."""
    shards = ((leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape, leaf.dtype)
              for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shards)


def part_of(scope):
    """Which part of a recipe a named scope belongs to."""
    for part, pattern in (("target", "target_layer_|verify"), ("drafter", "draft_layer_|draft_context|draft_backbone|commit"),
                          ("heads and loss", "heads|draft_head|lattice|sequential|rule")):
        if re.search(pattern, scope):
            return part
    return "rest"


def report(name, config, devices):
    """The `Report` of one of `PARTS`."""
    jitted, arguments, held = PARTS[name](config, devices)
    held = {what: bytes_on_chip(tree) for what, tree in held.items()}
    try:
        compiled = jitted.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = re.search(r"[^.\n]*[Ee]xceeded[^\n]*|Ran out of memory[^\n]*", str(error))
        return Report(name, held, None, None, None, said[0].strip() if said else str(error).splitlines()[0])
    memory = compiled.memory_analysis()
    total = (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
             + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes)
    return Report(name, held, memory.temp_size_in_bytes, total, hlo.work(compiled.as_text(), len(devices), part_of))


def print_report(found, chip, devices, most=12):
    """For people."""
    print(f"\n{found.name}: per chip, of {devices}")
    for what, size in found.held.items():
        print(f"  {what:<22}{size / GB:9.3f} GB")
    if found.work is None:
        print(f"  does not fit: {found.refusal}")
        return
    print(f"  {'temporaries':<22}{found.temporary / GB:9.3f} GB")
    verdict = "fits" if found.total <= chip.memory else "does NOT fit"
    print(f"  {'in all':<22}{found.total / GB:9.3f} GB of {chip.memory / GB:.0f} GB: {verdict}")
    flops, traffic = (sum(counts.values()) for counts in (found.work.flops, found.work.bytes))
    wire = sum(c.wire for c in found.work.collectives)
    print(f"\n  {'part':<16}{'products, TFLOP':>17}{'memory traffic, GB':>20}{'compiler estimates, ms':>24}")
    for part in sorted(found.work.bytes, key=lambda part: -found.work.flops.get(part, 0)):
        print(f"  {part:<16}{found.work.flops.get(part, 0) / 1e12:17.3f}{found.work.bytes[part] / GB:20.2f}"
              f"{1e3 * found.work.cycles.get(part, 0) / chip.clock:24.1f}")
    cycles = sum(found.work.cycles.values())
    print(f"  {'all':<16}{flops / 1e12:17.3f}{traffic / GB:20.2f}{1e3 * cycles / chip.clock:24.1f}\n")
    times = [1e3 * t for t in (flops / chip.flops, traffic / chip.bandwidth, wire / (2 * chip.link))]
    print("  at data sheet speeds: products {:.1f} ms, memory {:.1f} ms, links {:.1f} ms (rings, both ways): roofline "
          "{:.1f} ms".format(*times, max(times)))
    print(f"  through links {wire / GB:.3f} GB; sorts of width {max(found.work.sorts, default=0)} at most; collectives:")
    for c in found.work.collectives[:most]:
        print(f"  {c.count:6d} x {c.kind:<18} {c.array:<28} of {c.group:3d} chips {c.wire / GB:9.4f} GB   {c.scope}")
    if len(found.work.collectives) > most:
        rest = found.work.collectives[most:]
        print(f"  {sum(c.count for c in rest):6d} others{'':46}{sum(c.wire for c in rest) / GB:9.4f} GB")


if __name__ == "__main__":
    command_line.run(main)
