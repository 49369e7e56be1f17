"""DeepSpec's target cache, format version 2: token sequences with the target features a drafter is trained on.

A directory with manifest.json, samples.idx and the shards it names. Sample i is record i of samples.idx, 56 bytes:

    sample_id u64, shard_id u32, seq_len u32, then the byte offsets u64 inside the shard of input_ids int32 [S],
    attention_mask u8 [S], loss_mask u8 [S], target_hidden_states bf16 [S, L * D], target_last_hidden_states bf16 [S, D]

all little-endian. Shards are memory-mapped: a sample is read when it is asked for. The last hidden states are those
after the target's final norm; the others are the raw outputs of the tapped layers, side by side. DeepSpec's manifest
does not say so. Two fields of ours may: "layer_id_base" (0: target_layer_ids calls the first decoder layer 0 and the
embedding output -1; 1: these are 1 and 0) and "final_normed"; without them they are 0 and true.

S tokens of a sample, L tapped layers, D model width.
"""

import dataclasses
import os
import pathlib

import ml_dtypes
import numpy as np

from dspark_jax import target as target_lib
from dspark_jax.checkpoints.fields import Fields

MANIFEST, INDEX = "manifest.json", "samples.idx"
RECORD = np.dtype([
    ("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), ("input_ids", "<u8"), ("attention_mask", "<u8"),
    ("loss_mask", "<u8"), ("target_hidden_states", "<u8"), ("target_last_hidden_states", "<u8")])
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sequence, as read-only views of its shard: input_ids int32 [S], attention_mask and loss_mask uint8 [S],
    target_hidden_states bfloat16 [S, L * D], target_last_hidden_states bfloat16 [S, D]."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    loss_mask: np.ndarray
    target_hidden_states: np.ndarray
    target_last_hidden_states: np.ndarray


class TargetCache:
    """The samples of a cache directory; ``cache[i]`` is a `Sample`.

    Attributes:
      target: name or path of the target that made it, as its maker wrote it.
      target_layer_ids: the taps, -1 the embedding output and 0 the first decoder layer. hidden_size: D.
      final_normed: whether the last hidden states are those after the target's final norm.
      lengths: int64 [number of samples], tokens of each.

    Everything is checked when it is opened: the manifest's fields, the record numbers, that every byte range lies
    inside its shard and overlaps no other. Raises FileNotFoundError or ValueError that names the file and
    the field or sample.
    """

    def __init__(self, directory):
        self.directory = directory = pathlib.Path(directory)
        fields = Fields.read(directory / MANIFEST)
        if fields.integer("version") != 2:
            fields.refuse("version", "2")
        for name, value in (("hidden_dtype", "bfloat16"), ("token_dtype", "int32"), ("mask_dtype", "uint8")):
            fields.text(name, allowed=(value,))
        if fields.integer("index_record_size", RECORD.itemsize) != RECORD.itemsize:
            fields.refuse("index_record_size", str(RECORD.itemsize))
        self.target = fields.text("target_model_name_or_path", "")
        self.hidden_size = fields.integer("hidden_size", least=1)
        self.target_layer_ids = check_layer_ids(
            fields.path, fields.integers("target_layer_ids", least=-1), fields.integer("layer_id_base", 0))
        self.final_normed = fields.boolean("final_normed", True)
        self._arrays = arrays_of(self.hidden_size, len(self.target_layer_ids))
        self._index = directory / INDEX
        self._shards = _shard_files(directory, fields)
        self._sizes = {shard: os.path.getsize(file) for shard, file in self._shards.items()}
        self._records = self._read_index(fields.integer("num_samples"))
        self.lengths = self._records["seq_len"].astype(np.int64)

    def __len__(self):
        return len(self._records)

    def __getitem__(self, i) -> Sample:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i}; the cache holds {len(self)}")
        record = self._records[i]
        file = self._shards[int(record["shard_id"])]
        arrays = {}
        for name, dtype, width in self._arrays:
            shape = (int(record["seq_len"]), width) if width else (int(record["seq_len"]),)
            if 0 in shape:
                arrays[name] = np.zeros(shape, dtype)
            else:
                arrays[name] = np.memmap(file, dtype, "r", offset=int(record[name]), shape=shape)
        return Sample(**arrays)

    def batch(self, indices) -> dict[str, np.ndarray]:
        """Samples side by side, padded with zeros to the longest: the arrays of `Sample` with a leading batch axis, the
        hidden states as float32."""
        samples = [self[i] for i in indices]
        longest = max((len(s.input_ids) for s in samples), default=0)
        out = {}
        for name, dtype, width in self._arrays:
            shape = (len(samples), longest, width) if width else (len(samples), longest)
            out[name] = np.zeros(shape, np.float32 if dtype == _BFLOAT16 else dtype)
            for row, sample in zip(out[name], samples):
                row[:len(sample.input_ids)] = getattr(sample, name)
        return out

    def _read_index(self, count):
        file = self._index
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        if os.path.getsize(file) != count * RECORD.itemsize:
            raise ValueError(f"{file}: {os.path.getsize(file)} bytes; num_samples {count} in {MANIFEST} needs "
                             f"{count * RECORD.itemsize}")
        records = np.fromfile(file, RECORD)
        ranges = {shard: [] for shard in self._shards}
        for i, record in enumerate(records.tolist()):
            record = dict(zip(RECORD.names, record))
            if record["sample_id"] != i:
                raise ValueError(f"{file}: record {i}: sample_id {record['sample_id']}; must be {i}")
            if record["shard_id"] not in self._shards:
                raise ValueError(f"{file}: record {i}: shard_id {record['shard_id']}; {MANIFEST} has "
                                 f"{sorted(self._shards)}")
            for name, dtype, width in self._arrays:
                begin = record[name]
                end = begin + record["seq_len"] * dtype.itemsize * (width or 1)
                if end > self._sizes[record["shard_id"]]:
                    raise ValueError(f"{file}: record {i}: {name} ends at byte {end}, but "
                                     f"{self._shards[record['shard_id']].name} has {self._sizes[record['shard_id']]}")
                ranges[record["shard_id"]].append((begin, end, i, name))
        for shard in ranges.values():
            shard = sorted(r for r in shard if r[0] < r[1])
            for before, after in zip(shard, shard[1:]):
                if after[0] < before[1]:
                    raise ValueError(f"{file}: record {after[2]}: {after[3]} overlaps {before[3]} of record "
                                     f"{before[2]}")
        return records


def arrays_of(hidden_size, taps):
    """(name, dtype, columns or 0 for none) of the arrays of a sample, in the order of the file."""
    return (("input_ids", np.dtype("<i4"), 0), ("attention_mask", np.dtype(np.uint8), 0),
            ("loss_mask", np.dtype(np.uint8), 0), ("target_hidden_states", _BFLOAT16, hidden_size * taps),
            ("target_last_hidden_states", _BFLOAT16, hidden_size))


def check_layer_ids(path, layer_ids, base) -> tuple[int, ...]:
    """Layer ids of a maker who calls the first decoder layer ``base``, as they are counted here: -1 the embedding
    output, 0 the first decoder layer. Raises ValueError that names the path and the field."""
    if base not in (0, 1):
        raise ValueError(f"{path}: layer_id_base: {base!r}; must be 0 or 1, the number of the first decoder layer")
    ids = tuple(i - base for i in layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
        raise ValueError(f"{path}: target_layer_ids: {list(layer_ids)}; must be strictly increasing, not empty, and at "
                         f"least {base - 1}, the embedding output")
    return ids


def check_fits(cache, target, tokens: int = 64) -> None:
    """Raises ValueError that names the field unless a cache holds what the target computes, for its first tokens.

    States must be nearer to those of the layers they are said to be of than to those of any other, and the last hidden
    states nearer to the final-normed ones or to the raw ones, as `final_normed` says.

    Args:
      cache: a `TargetCache` or a `speculators_cache.SpeculatorsCache`, with tokens in it.
      target: a `dspark_jax.target.Target`.
      tokens: how many to run the target on, of the first sample that has any.
    """
    config, D, first = target.config, cache.hidden_size, int(np.argmax(cache.lengths > 0))
    sample, where, last = cache[first], f"{cache.directory}: sample {first}", config.num_hidden_layers - 1
    if D != config.hidden_size:
        raise ValueError(f"{cache.directory}: hidden_size: {D}; the target's is {config.hidden_size}")
    if cache.target_layer_ids[-1] > last:
        raise ValueError(f"{cache.directory}: target_layer_ids: {list(cache.target_layer_ids)}; the target's layers "
                         f"are 0..{last}")
    ids = sample.input_ids[:tokens]
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"{where}: input_ids: {ids.max()}; the target's vocabulary is [0, {config.vocab_size})")
    layers = tuple(range(-1, config.num_hidden_layers))
    normed, computed = target_lib.forward(config, target.params, ids[None], layers)
    computed = dict(zip(layers, np.asarray(computed, np.float32)[:, 0]))

    def nearest(stored, choices):
        """The choice with the smallest median distance: a few tokens have states far larger than all others."""
        stored = np.asarray(stored[:tokens], np.float32)
        return min(choices, key=lambda name: np.median(np.linalg.norm(choices[name] - stored, axis=-1)))

    for i, layer in enumerate(cache.target_layer_ids):
        if (found := nearest(sample.target_hidden_states[:, i * D:(i + 1) * D], computed)) != layer:
            raise ValueError(f"{where}: target_hidden_states: those of layer {layer} are nearest to the target's layer "
                             f"{found}; another target, or another layer_id_base")
    choices = {True: np.asarray(normed, np.float32)[0], False: computed[last]}
    if (found := nearest(sample.target_last_hidden_states, choices)) != cache.final_normed:
        raise ValueError(f"{where}: target_last_hidden_states: final_normed is {cache.final_normed}, but they are "
                         f"nearer to those {'after' if found else 'before'} the target's final norm")


def _shard_files(directory, fields):
    """{shard_id: path} of the manifest's shards, which must lie in the directory itself."""
    shards, listed = {}, fields.raw("shards")
    if not isinstance(listed, list) or len(listed) != fields.integer("num_shards"):
        raise ValueError(f"{fields.path}: shards: must be a list of num_shards, {fields.integer('num_shards')}, "
                         "entries")
    for i, shard in enumerate(listed):
        if not isinstance(shard, dict):
            raise ValueError(f"{fields.path}: shards[{i}]: must be an object")
        entry = Fields(fields.path, [(f"shards[{i}].", shard)])
        name, number = entry.text("file_name"), entry.integer("shard_id")
        if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
            entry.refuse("file_name", "the name of a file in the same directory")
        if number in shards:
            entry.refuse("shard_id", "different from those of the other shards")
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name}: no such file; {MANIFEST} names it")
        shards[number] = directory / name
    return shards
