"""Writes a target cache (see `target_cache`) sample by sample, in any order, so that it can be stopped and gone on with.

Where each sample lies follows from the lengths alone. So the shards have their final size from the beginning, several
samples may be on their way at a time, and progress.json need hold no more than how many are done. manifest.json comes
last: a directory without it is no cache yet.
"""

import json
import pathlib

import numpy as np

from dspark_jax.data import target_cache
from dspark_jax.data.target_cache import INDEX, MANIFEST, RECORD
from dspark_jax.whole_files import replacing

PROGRESS = "progress.json"
SHARD_BYTES = 2**36  # the largest shard, as DeepSpec has it; a longer sample gets one of its own


class Writer:
    """A cache that is being written, or one that is already complete.

    Args:
      directory: where; it is made if it is not there.
      lengths: tokens of each sample, in order.
      target: the target's name, for the manifest.
      layer_ids: the taps, -1 the embedding output and 0 the first decoder layer.
      hidden_size: D.
      fingerprint: a text that other tokens, or another target of that name, would not have.

    Attribute ``done``: what was last given to `keep`, 0 in a new directory and ``len(lengths)`` in a complete one. Shards that
    are missing or have another size are an unfinished beginning: ``done`` is 0 then.

    Raises ValueError where the directory holds a cache of something else, with the names of the fields that differ.
    """

    def __init__(self, directory, lengths, *, target, layer_ids, hidden_size, fingerprint):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._arrays = target_cache.arrays_of(hidden_size, len(layer_ids))
        self.records, sizes = places(lengths, self._arrays)
        self._shards = {self.directory / f"shard-{number:05d}.bin": size for number, size in enumerate(sizes)}
        self._manifest = {
            "version": 2, "num_samples": len(lengths), "num_shards": len(sizes), "target_layer_ids": list(layer_ids),
            "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8",
            "index_record_size": RECORD.itemsize, "hidden_size": hidden_size,
            "shards": [{"shard_id": number, "file_name": file.name} for number, file in enumerate(self._shards)],
            "target_model_name_or_path": target, "layer_id_base": 0, "final_normed": True, "fingerprint": fingerprint}
        self.done = self._begun()
        if any(not file.exists() or file.stat().st_size != size for file, size in self._shards.items()):
            self.restart()
            for file, size in self._shards.items():
                with open(file, "wb") as f:
                    f.truncate(size)
        self._open = {number: np.memmap(file, np.uint8, "r+", shape=(size,))
                      for number, (file, size) in enumerate(self._shards.items()) if size}

    def restart(self):
        """Nothing is done, whatever there is."""
        self.done = 0
        for name in (MANIFEST, PROGRESS):
            (self.directory / name).unlink(missing_ok=True)

    def put(self, i, *arrays):
        """Sample i, its arrays in the order of `target_cache.Sample`. Raises ValueError for another shape or dtype."""
        record = self.records[i]
        for (name, dtype, width), array in zip(self._arrays, arrays, strict=True):
            shape = (int(record["seq_len"]), width) if width else (int(record["seq_len"]),)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"sample {i}: {name}: {array.dtype}{list(array.shape)}; must be {dtype}{list(shape)}")
            begin = int(record[name])
            if array.size:
                self._open[int(record["shard_id"])][begin:begin + array.nbytes] = (
                    np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def keep(self, done):
        """What was put is on disk, and ``done`` says how much of it there is: the next `Writer` here begins there."""
        for shard in self._open.values():
            shard.flush()
        with replacing(self.directory / PROGRESS, "w") as file:
            json.dump(self._manifest | {"done": int(done)}, file)
        self.done = done

    def finish(self):
        """-> the `target_cache.TargetCache`, now complete."""
        if not (self.directory / MANIFEST).exists():
            for shard in self._open.values():
                shard.flush()
            self.records.tofile(self.directory / INDEX)
            with replacing(self.directory / MANIFEST, "w") as file:
                json.dump(self._manifest, file, indent=1)
            (self.directory / PROGRESS).unlink(missing_ok=True)
        return target_cache.TargetCache(self.directory)

    def _begun(self):
        """How much there is of this cache. Raises ValueError for another one, or where that cannot be read."""
        for file in (self.directory / MANIFEST, self.directory / PROGRESS):
            if not file.exists():
                continue
            try:
                found = json.loads(file.read_bytes())
                if not isinstance(found, dict):
                    raise ValueError("not an object")
                done = int(found["done"]) if file.name == PROGRESS else len(self.records)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}: damaged ({error}); delete {self.directory}") from error
            different = [name for name in self._manifest if name not in found or found[name] != self._manifest[name]]
            if different:
                raise ValueError(f"{self.directory} holds features of something else ({', '.join(different)} differ): "
                                 "choose another directory or delete this one")
            return done
        return 0


def places(lengths, arrays):
    """(records of `RECORD`, bytes of each shard): samples of these lengths one after the other, their ``arrays`` (name,
    dtype, columns) too, in shards that are no larger than they may be."""
    records, sizes = np.zeros(len(lengths), RECORD), [0]
    for i, S in enumerate(np.asarray(lengths).tolist()):
        nbytes = [S * dtype.itemsize * (width or 1) for _, dtype, width in arrays]
        if sizes[-1] and sizes[-1] + sum(nbytes) > SHARD_BYTES:
            sizes.append(0)
        records[i]["sample_id"], records[i]["shard_id"], records[i]["seq_len"] = i, len(sizes) - 1, S
        for (name, _, _), size in zip(arrays, nbytes):
            records[i][name] = sizes[-1]
            sizes[-1] += size
    return records, sizes
