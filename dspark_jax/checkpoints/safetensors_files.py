"""The tensors of a Hugging Face directory: model.safetensors, or shards that model.safetensors.index.json lists.

A file is eight bytes with the length n of the header, n bytes of JSON, then the data. The header gives each tensor's
dtype, shape and byte range. It is believed only after it has been checked against the size of the file: ranges must fit
their shapes and tile the data without gap or overlap, so nothing is allocated that the file does not really hold.
A tensor is memory-mapped when it is asked for and unmapped when it is dropped.
"""

import dataclasses
import json
import math
import os
import pathlib
import struct

import ml_dtypes
import numpy as np

from dspark_jax.whole_files import replacing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # what the format's own library accepts


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: ``file``, ``dtype`` (a key of `DTYPES`), ``shape``, first byte ``offset`` in the file."""

    file: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """The tensor as a read-only array that is backed by the file. Copy it before the file may change."""
        if 0 in self.shape:
            return np.zeros(self.shape, DTYPES[self.dtype])
        return np.memmap(self.file, DTYPES[self.dtype], "r", offset=self.offset, shape=self.shape)


def read_directory(directory) -> dict[str, StoredTensor]:
    """All tensors of a directory by name.

    Raises FileNotFoundError or ValueError that names the file and what is wrong with it: neither or both of
    model.safetensors and its index, an index that names a missing file, a path, or another tensor than a shard holds,
    and everything that `read_header` refuses.
    """
    directory = pathlib.Path(directory)
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{directory}: holds both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        raise FileNotFoundError(f"{directory}: no weights; allowed: {SINGLE}, or shards with {INDEX}")
    placed = _read_index(index)
    tensors = {}
    for file in sorted(set(placed.values())):
        found = read_header(directory / file)
        for name in found:
            if placed.get(name) != file:
                raise ValueError(f"{directory / file}: tensor {name!r} is not where {INDEX} says "
                                 f"({placed.get(name, 'nowhere')})")
        tensors |= found
    missing = next((name for name in placed if name not in tensors), None)
    if missing is not None:
        raise ValueError(f"{directory / placed[missing]}: tensor {missing!r} is missing; {INDEX} says it is here")
    return tensors


def _read_index(index):
    data = parse_json(index.read_bytes(), index)
    placed = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{index}: weight_map: {type(placed).__name__} found; must be {{tensor name: file name}}")
    for name, file in placed.items():
        # A plain name only: nothing that a file says may lead out of its directory.
        if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\:\0"):
            raise ValueError(f"{index}: weight_map[{name!r}]: {file!r}; must be the name of a file in the same folder")
        if not (index.parent / file).is_file():
            raise ValueError(f"{index}: weight_map[{name!r}]: {file!r}: there is no such file")
    return placed


def read_header(file) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name. Only the header is read.

    Raises ValueError that names the file and, where there is one, the tensor: a header that is shorter or longer than
    the file allows or no JSON, an unknown dtype, a shape that is none, byte ranges that do not fit the shape, leave the
    file, overlap or leave gaps.
    """
    file = pathlib.Path(file)
    size = os.path.getsize(file)
    with open(file, "rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise ValueError(f"{file}: {size} bytes; a safetensors file starts with 8 bytes of header length")
        (length,) = struct.unpack("<Q", start)
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{file}: header length {length}; must lie in [2, {min(size - 8, _HEADER_LIMIT)}], as the "
                             f"file has {size} bytes")
        header = parse_json(stream.read(length), file)
    if not isinstance(header, dict):
        raise ValueError(f"{file}: header: {type(header).__name__} found; must be an object")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors, ranges = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _check_entry(file, name, entry, size - data)
        tensors[name] = StoredTensor(file=file, name=name, dtype=dtype, shape=shape, offset=data + begin)
        ranges.append((begin, end, name))
    reached, before = 0, None
    for begin, end, name in sorted(ranges):
        if begin != reached:
            what = "overlaps" if begin < reached else "leaves a gap after"
            raise ValueError(f"{file}: tensor {name!r}: data_offsets [{begin}, {end}] {what} "
                             f"{before or 'the header'!r}, which ends at {reached}")
        reached, before = end, name
    if reached != size - data:
        raise ValueError(f"{file}: {size - data} bytes of data, but the header describes {reached}")
    return tensors


def _check_entry(file, name, entry, available):
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: header entry must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where}: dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 32 or not all(_is_size(n) for n in shape):
        raise ValueError(f"{where}: shape {shape!r}; must be a list of at most 32 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise ValueError(f"{where}: data_offsets {offsets!r}; must be two positions")
    begin, end = offsets
    if not begin <= end <= available:
        raise ValueError(f"{where}: data_offsets {offsets}; must be ascending and within the {available} bytes of data")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(f"{where}: data_offsets {offsets} hold {end - begin} bytes; {dtype} {shape} needs {needed}")
    return dtype, tuple(shape), begin, end


def _is_size(n):
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63


def parse_json(text: bytes, file):
    """JSON of a file from elsewhere; raises ValueError that names the file, also for a key that occurs twice."""

    def unique(pairs):
        found = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"key {key!r} occurs twice")
            found[key] = value
        return found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{file}: not JSON (nested too deeply)") from None
    except ValueError as error:  # bad UTF-8, bad JSON, a number of absurd length, a key twice
        raise ValueError(f"{file}: not JSON ({error})") from None


def write_file(file, tensors: dict[str, np.ndarray]) -> None:
    """Write ``tensors`` (numpy arrays, or jax arrays) as one safetensors file, one tensor after the other."""
    # Wide dtypes first, so that every tensor is aligned; the header is padded to a multiple of 8 bytes with blanks.
    order = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        array = tensors[name]
        end = position + math.prod(array.shape) * np.dtype(array.dtype).itemsize
        header[name] = {"dtype": _NAMES[np.dtype(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(file) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            stream.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
