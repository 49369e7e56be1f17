"""Target features of a fixed set of token sequences, computed once and kept on disk.

One row a token: the tapped hidden states side by side, then the final-normed state, as bfloat16. Row r of sequence i is
position r of that sequence; sequences follow each other in the order of the token file. Beside it one float32 a token,
the log-normaliser of the target's law there: a product with the whole vocabulary that every step would otherwise repeat
for every draft. A manifest says how many sequences are complete, so an interrupted pass goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dspark_jax import layers
from dspark_jax import target as target_lib

BUCKET = 64  # sequences are padded to a multiple of this: few compiled shapes, little waste


@dataclasses.dataclass(frozen=True)
class Features:
    """``rows`` bfloat16 [tokens, (taps+1) * D] and ``log_normalizers`` float32 [tokens], memory-mapped; ``starts`` int64
    [sequences + 1], where each sequence begins in them."""

    rows: np.ndarray
    log_normalizers: np.ndarray
    starts: np.ndarray

    def of(self, i):
        """(rows, log_normalizers) of sequence i."""
        here = slice(self.starts[i], self.starts[i + 1])
        return self.rows[here], self.log_normalizers[here]


def compute(target, sequences, taps, directory, batch=16, progress=None):
    """Features of ``sequences`` (list of int arrays) in ``directory``; reuses what is there if it belongs to them.

    Raises ValueError if the directory holds features of other tokens, taps or target weights.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(s) for s in sequences], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    width = (len(taps) + 1) * target.config.hidden_size
    manifest = {"version": 2, "taps": list(taps), "width": width, "tokens": int(starts[-1]),
                "fingerprint": fingerprint(target, sequences)}
    state, files = directory / "manifest.json", [directory / "features.bin", directory / "log_normalizers.bin"]
    done = 0
    if state.exists():
        try:
            found = json.loads(state.read_bytes())
            done = int(found.pop("done"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{state}: damaged ({error}); delete it and {files[0].name}") from error
        different = [k for k in manifest if found.get(k) != manifest[k]]
        if different:
            raise ValueError(f"{directory} holds features of something else ({', '.join(different)} differ): "
                             "choose another directory or delete this one")
    sizes = [int(starts[-1]) * width * 2, int(starts[-1]) * 4]
    for file, size in zip(files, sizes):
        if not file.exists() or file.stat().st_size != size:
            done = 0
            with open(file, "wb") as f:
                f.truncate(size)
    rows = np.memmap(files[0], ml_dtypes.bfloat16, "r+", shape=(int(starts[-1]), width))
    log_normalizers = np.memmap(files[1], np.float32, "r+", shape=(int(starts[-1]),))
    head = target.head_rows()
    # Longest last: batches of like length; the order is a pure function of the lengths, so `done` means the same again.
    order = np.argsort(lengths, kind="stable")
    while done < len(order):
        chosen = order[done:done + batch]
        padded = -(-int(lengths[chosen].max()) // BUCKET) * BUCKET
        tokens = np.zeros((batch, padded), np.int32)
        for row, i in enumerate(chosen):
            tokens[row, :lengths[i]] = sequences[i]
        out = rows_of(target.config, target.params, jnp.asarray(tokens), tuple(taps))
        norms, out = np.asarray(log_normalizers_of(head, out[..., -target.config.hidden_size:])), np.asarray(out)
        for row, i in enumerate(chosen):
            rows[starts[i]:starts[i + 1]] = out[row, :lengths[i]]
            log_normalizers[starts[i]:starts[i + 1]] = norms[row, :lengths[i]]
        done += len(chosen)
        rows.flush()
        log_normalizers.flush()
        scratch = state.with_suffix(".tmp")
        scratch.write_text(json.dumps({**manifest, "done": int(done)}))
        os.replace(scratch, state)
        if progress:
            progress(done, len(order))
    return Features(rows, log_normalizers, starts)


def rows_of(config, params, tokens, taps, documents=None):
    """tokens int [B, S] -> bfloat16 [B, S, (taps+1) * D]: tapped states, then the final-normed one. documents
    int [B, S]: of packed rows."""
    hidden, tapped = target_lib.forward(config, params, tokens, taps, documents)
    return jnp.concatenate([*tapped, hidden], axis=-1).astype(jnp.bfloat16)


@jax.jit
def log_normalizers_of(head, final):
    """head [V, D], final [B, S, D] final-normed states -> float32 [B, S]: log sum_v exp(<head_v, final>)."""
    return jax.lax.map(lambda row: log_normalizer(head, row), final)


def log_normalizer(head, final):
    """The same for states [..., D], all of whose logits exist at one time."""
    return jax.nn.logsumexp(layers.table_logits(final.astype(head.dtype), head), axis=-1)


def fingerprint(target, sequences):
    """A hash of the tokens and of a sample of the target's weights."""
    digest = hashlib.sha256()
    for s in sequences:
        digest.update(np.asarray(s, np.int32).tobytes() + b";")
    for leaf in jax.tree.leaves(target.params):
        digest.update(np.asarray(leaf).reshape(-1)[:64].tobytes())
    return digest.hexdigest()
