"""From the tensors of a directory to a parameter tree and back, strictly: every tensor is expected, and used once.

Linear weights are [out, in] here and there; the few of ours that are not say so.
"""

import collections
import dataclasses
import pathlib

import jax
import numpy as np

from dspark_jax.checkpoints.safetensors_files import DTYPES, INDEX, StoredTensor

FLOATS = ("BF16", "F16", "F32")


@dataclasses.dataclass(frozen=True)
class Entry:
    """How one array of ours is stored: its ``name`` and ``shape`` in the file, and whether that is our transpose.

    ``dtype``: of `DTYPES`; None: that of the checkpoint. A stored shape may have axes of size 1 that ours lacks.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    dtype: str | None = None

    @classmethod
    def of(cls, name, shape, transposed=False) -> "Entry":
        """The entry of an array of ours with ``shape``."""
        return cls(name, tuple(shape[::-1] if transposed else shape), transposed)

    def stored(self, array) -> np.ndarray:
        """Our array as it goes to the file (a view, where numpy can)."""
        array = np.asarray(array)
        return (array.T if self.transposed else array).reshape(self.shape)


def weight_dtype(tensors: dict[str, StoredTensor]) -> str:
    """The float dtype that most tensors have; all weights must have it. "F32" where there are none."""
    count = collections.Counter(t.dtype for t in tensors.values() if t.dtype in FLOATS)
    return count.most_common(1)[0][0] if count else "F32"


def check(directory, tensors: dict[str, StoredTensor], entries: list[Entry], unused=()) -> None:
    """Raises ValueError unless ``tensors`` are exactly those of ``entries``, with their shapes and dtypes.

    The message names the file, the tensor, and what was expected and found. ``unused``: names that may be there too.
    """
    dtype = weight_dtype(tensors)
    files = {t.file for t in tensors.values()}
    where = files.pop() if len(files) == 1 else pathlib.Path(directory) / INDEX
    expected = {entry.name: entry for entry in entries}
    unknown = next((t for name, t in tensors.items() if name not in expected and name not in unused), None)
    surplus = "" if unknown is None else (
        f"{unknown.file}: tensor {unknown.name!r} {list(unknown.shape)} {unknown.dtype} is not expected: nothing in "
        "config.json asks for it")
    for name, entry in expected.items():
        found = tensors.get(name)
        if found is None:
            also = f"; {surplus.partition(': ')[2]}" if surplus else ""
            raise ValueError(f"{where}: tensor {name!r} is missing, expected {list(entry.shape)} {entry.dtype or dtype}"
                             f"{also}")
        if found.shape != entry.shape:
            raise ValueError(f"{found.file}: tensor {name!r} has shape {list(found.shape)}, expected "
                             f"{list(entry.shape)}")
        if found.dtype != (entry.dtype or dtype):
            why = "" if entry.dtype else ", as the other weights" if dtype in FLOATS else ""
            raise ValueError(f"{found.file}: tensor {name!r} {list(found.shape)} has dtype {found.dtype}, expected "
                             f"{entry.dtype or dtype}{why}")
    if surplus:
        raise ValueError(surplus)


def place(tensor: StoredTensor, entry: Entry, shape, dtype=None) -> jax.Array:
    """One stored tensor as our array of ``shape`` on the device.

    dtype: None keeps bfloat16 and float32; float16 becomes float32, whose range activations need. At any time only this
    one tensor is mapped, and it is copied: the array must not depend on the file.
    """
    array = tensor.map()
    array = (array.T if entry.transposed else array).reshape(shape)
    if dtype is None:
        dtype = np.float32 if tensor.dtype == "F16" else DTYPES[tensor.dtype]
    # Straight from the mapping, transposed or not: jnp.array would make a second copy on the way.
    placed = jax.device_put(array if array.dtype == dtype else array.astype(dtype), may_alias=False)
    placed.block_until_ready()  # the mapping ends here
    return placed
