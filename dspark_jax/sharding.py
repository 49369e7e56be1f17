"""Where arrays lie on the devices: one mesh, and one table from the path of an array to its axes.

The mesh has three axes.

    data     copies of all weights; each device has other sequences
    fsdp     sequences are spread over it too, and weights are stored in parts: every layer's are gathered when it runs
    tensor   the vocabulary, heads and feed-forward width are spread over it; its devices have the same sequences

One device is the mesh (1, 1, 1), and nothing else is special about it. `RULES` names, for each dimension of an array, the
axis that it is spread over; it holds for parameters, for the optimizer's moments, which have the same paths at their
ends, for the frozen tables and for the target.
"""

import contextlib
import math
import os
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # what sequences are spread over

# The first expression found in an array's path decides. Linear weights are [out, in]. The maps into heads and into the
# feed-forward width are cut by output and those out of them by input, so that only their results are summed over devices.
RULES = (
    (r"(embedding|head_rows|target_head|lm_head/weight|predecessor|successor)$", ("tensor", "fsdp")),  # [V, D], [V, R]
    (r"([qkv]|gate|up)_proj/weight$", ("tensor", "fsdp")),
    (r"([qkv]|gate|up)_proj/bias$", ("tensor",)),
    (r"((o|down)_proj|fc)/weight$", ("fsdp", "tensor")),
    (r"(hidden_projection|gate_kernel|joint_kernel|kernel_projection)$", (None, "fsdp")),
    (r"", ()),  # norms, biases, counts, tables of ids: everywhere whole
)


def join_processes():
    """Make one program of several processes; before anything else is asked of jax.

    On a TPU pod they find each other. Elsewhere JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID in the environment say who they are. Raises ValueError where neither is the case.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [os.environ.get(name) for name in names]
    if not all(given) and any(given):
        raise ValueError(f"{names[given.index(None)]}: not set; allowed: all of {', '.join(names)}, or none on a TPU pod")
    if not all(value.isdecimal() for value in given[1:] if value):
        raise ValueError(f"{names[1]}, {names[2]}: {given[1]}, {given[2]}; must be whole numbers")
    address, count, index = given
    try:
        jax.distributed.initialize(address, count and int(count), index and int(index))
    except ValueError as error:
        raise ValueError(f"multihost: {error} Set {', '.join(names)}") from error


def make_mesh(sizes: Mapping[str, int], devices=None) -> Mesh:
    """A mesh with the axes `AXES` over ``devices`` (None: all of them).

    sizes: devices along each axis; -1, at most once, for all that the other axes leave over. Left out: 1, and -1 for
    "data". Where no size is -1, a single process may use fewer devices than there are.

    Raises ValueError naming the field and what is allowed.
    """
    devices = jax.devices() if devices is None else devices
    for name in sizes:
        if name not in AXES:
            raise ValueError(f"mesh.{name}: unknown axis; allowed: {', '.join(AXES)}")
    shape = [sizes.get(name, -1 if name == "data" else 1) for name in AXES]
    for name, size in zip(AXES, shape):
        if size < 1 and size != -1:
            raise ValueError(f"mesh.{name}: {size}; must be at least 1, or -1 for all devices left over")
    if shape.count(-1) > 1:
        raise ValueError(f"mesh: {shape.count(-1)} axes are -1; allowed: one")
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape:
        name = AXES[shape.index(-1)]
        if len(devices) % known:
            others = " x ".join(f"mesh.{other}" for other in AXES if other != name)
            raise ValueError(f"{others}: {known}; must divide the number of devices, {len(devices)}")
        shape[shape.index(-1)] = len(devices) // known
    elif known > len(devices) or (known < len(devices) and jax.process_count() > 1):
        raise ValueError(f"mesh: {' x '.join(map(str, shape))} = {known} devices; there are {len(devices)}")
    return Mesh(np.array(devices[:math.prod(shape)]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def one_device() -> Mesh:
    """The mesh (1, 1, 1)."""
    return make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])


def path_of(keys) -> str:
    """A key path of jax.tree_util as "backbone/layers_0/mlp/up_proj/weight"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def axes_of(path: str) -> tuple:
    """The axis of each dimension, by `RULES`; dimensions without an entry are not spread."""
    return next(axes for pattern, axes in RULES if re.search(pattern, path))


def shardings(mesh: Mesh, tree, gathered: bool = False):
    """A `NamedSharding` for each array (or its shape) of a tree. gathered: as layers compute with it, whole over "fsdp".

    Raises ValueError where an axis of the mesh does not divide the dimension that is spread over it.
    """
    def sharding(keys, leaf):
        path = path_of(keys)
        axes = axes_of(path)
        for dimension, axis in enumerate(axes):
            if axis and leaf.shape[dimension] % mesh.shape[axis]:
                raise ValueError(f"mesh.{axis}: {mesh.shape[axis]}; must divide dimension {dimension} of {path}, "
                                 f"{leaf.shape[dimension]}")
        return NamedSharding(mesh, jax.P(*(None if gathered and axis == "fsdp" else axis for axis in axes)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def gather(mesh: Mesh, tree, dtype=None):
    """In a compiled program: weights as layers compute with them, whole over "fsdp" and in ``dtype`` (None: their own).

    They are rounded before they travel. Gradients come back in parts, in the dtype that they are stored in.
    """
    def cast(x):
        return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.lax.with_sharding_constraint(jax.tree.map(cast, tree), shardings(mesh, tree, gathered=True))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, jax.P())


def by_sequence(mesh: Mesh) -> NamedSharding:
    """The leading axis, sequences, over "data" and "fsdp"."""
    return NamedSharding(mesh, jax.P(BATCH))


def sequences_per_device(mesh: Mesh, sequences: int, micro_steps: int) -> int:
    """How many of ``sequences`` a device has in a micro-step. Raises ValueError where they cannot be spread evenly."""
    if sequences % micro_steps:
        raise ValueError(f"batch.micro_steps: {micro_steps}; must divide batch.sequences, {sequences}")
    parts = micro_steps * mesh.shape["data"] * mesh.shape["fsdp"]
    if sequences % parts:
        raise ValueError(f"batch.sequences: {sequences}; must be a multiple of batch.micro_steps x mesh.data x mesh.fsdp, "
                         f"{micro_steps} x {mesh.shape['data']} x {mesh.shape['fsdp']}")
    return sequences // parts


def place(tree, shardings, dtype=None):
    """Arrays that every process has whole -> the same, each device of the mesh holding its part; floats in ``dtype``, None
    for their own."""
    def put(x, sharding):
        x = np.asarray(x)
        kind = dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.array(x[index], kind))

    return jax.tree.map(put, tree, shardings)


def whole(tree):
    """The arrays of a tree, each of them whole on every process."""
    return jax.tree.map(jnp.asarray, multihost_utils.process_allgather(tree, tiled=True))


@contextlib.contextmanager
def first_process_first():
    """The body runs in process 0; when it is done, in the others, which find what it wrote."""
    if jax.process_index() != 0:
        multihost_utils.sync_global_devices("first process")
    yield
    if jax.process_index() == 0:
        multihost_utils.sync_global_devices("first process")


def own_rows(mesh: Mesh, sequences: int) -> np.ndarray:
    """Which sequences of a batch the devices of this process hold: int, ascending."""
    index = by_sequence(mesh).addressable_devices_indices_map((sequences,))
    return np.unique(np.concatenate([np.arange(sequences)[rows] for rows, in index.values()]))


def assemble(mesh: Mesh, tree, sequences: int):
    """Arrays of the sequences `own_rows` -> the global arrays [sequences, ...] that all processes have together."""
    def put(x):
        return jax.make_array_from_process_local_data(by_sequence(mesh), x, (sequences, *x.shape[1:]))

    return jax.tree.map(put, tree)
