"""Target features of a fixed set of documents, kept on disk: made here, or by another program.

What is made here is a target cache in DeepSpec's format (`dspark_jax.data.target_cache`), which its trainer reads as well.
Beside it lies log_normalizers.bin, one float32 a token in the order of the documents: the log-normaliser of the target's
law there, a product with the whole vocabulary that every step would otherwise repeat for every draft.

D model width, S tokens of a document or row, B rows, V vocabulary.
"""

import collections.abc
import dataclasses
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dspark_jax import layers
from dspark_jax import target as target_lib
from dspark_jax.data.documents import Documents
from dspark_jax.data.speculators_cache import SpeculatorsCache
from dspark_jax.data.target_cache import TargetCache, check_fits
from dspark_jax.data.target_cache_writer import Writer

BUCKET = 64  # sequences are padded to a multiple of this: few compiled shapes, little waste
MAKERS = ("deepspec", "speculators")
LOG_NORMALIZERS = "log_normalizers.bin"


@dataclasses.dataclass(frozen=True)
class Features:
    """``cache``: a `TargetCache` or a `SpeculatorsCache`. log_normalizers: float32 [tokens of all documents], or None where
    nobody stored them. final_norm: None, or what to apply to the last hidden states, which are raw then."""

    cache: TargetCache | SpeculatorsCache
    log_normalizers: np.ndarray | None = None
    final_norm: collections.abc.Callable | None = None

    def of(self, i):
        """Of document i: rows bfloat16 [S, (taps + 1) * D], the tapped states side by side and the final-normed one; and
        log_normalizers float32 [S] or None."""
        sample = self.cache[i]
        last = sample.target_last_hidden_states
        rows = np.concatenate([sample.target_hidden_states, self.final_norm(last) if self.final_norm else last], axis=-1)
        norms = None
        if self.log_normalizers is not None:
            norms = self.log_normalizers[self._starts[i]:self._starts[i + 1]]
        return rows.astype(ml_dtypes.bfloat16, copy=False), norms

    @functools.cached_property
    def _starts(self):
        return np.concatenate([[0], np.cumsum(self.cache.lengths)])


def compute(target, documents, taps, directory, name="", batch=16, progress=None):
    """`Features` of ``documents`` in ``directory``; goes on with what is there if it belongs to them.

    name: of the target, for others to read. progress(done, of how many) is called after each batch. Raises ValueError if the
    directory holds features of other documents, taps or target weights.
    """
    file, total = pathlib.Path(directory) / LOG_NORMALIZERS, int(documents.starts[-1])
    writer = Writer(directory, documents.length.astype(np.int64), target=name, layer_ids=taps,
                    hidden_size=target.config.hidden_size, fingerprint=fingerprint(target, documents))
    if not file.exists() or file.stat().st_size != total * 4:
        writer.restart()
        with open(file, "wb") as f:
            f.truncate(total * 4)
    log_normalizers = np.memmap(file, np.float32, "r+", shape=(total,)) if total else np.zeros(0, np.float32)
    head, D = target.head_rows(), target.config.hidden_size
    # Longest last: batches of like length; the order is a pure function of the lengths, so `done` means the same again.
    order = np.argsort(documents.length, kind="stable")
    while writer.done < len(order):
        chosen = order[writer.done:writer.done + batch]
        padded = -(-int(documents.length[chosen].max()) // BUCKET) * BUCKET
        tokens = np.zeros((batch, padded), np.int32)
        for row, i in enumerate(chosen):
            tokens[row, :documents.length[i]] = documents.document(i)[0]
        out = rows_of(target.config, target.params, jnp.asarray(tokens), tuple(taps))
        norms, out = np.asarray(log_normalizers_of(head, out[..., -D:])), np.asarray(out)
        for row, i in enumerate(chosen):
            (_, mask), S = documents.document(i), documents.length[i]
            writer.put(i, tokens[row, :S], np.ones(S, np.uint8), mask.astype(np.uint8), out[row, :S, :-D], out[row, :S, -D:])
            log_normalizers[documents.starts[i]:documents.starts[i + 1]] = norms[row, :S]
        log_normalizers.flush()
        writer.keep(writer.done + len(chosen))
        if progress:
            progress(writer.done, len(order))
    return Features(writer.finish(), log_normalizers)


def open_made(options, target, taps, documents=None):
    """`Features` that another program made, as a training config's ``features`` section says, after a comparison with
    what the target computes.

    documents: tokens and loss masks, for files that have none. Raises FileNotFoundError or ValueError that names the
    file and the field.
    """
    if options.made_by == "deepspec":
        cache = TargetCache(options.directory)
    else:
        cache = SpeculatorsCache(options.directory, documents, options.layer_ids, layer_id_base=options.layer_id_base,
                                 final_normed=options.final_normed)
    if cache.target_layer_ids != tuple(taps):
        raise ValueError(f"drafter.target_layer_ids: {list(taps)}; the features in {cache.directory} are those of "
                         f"{list(cache.target_layer_ids)}, counted from 0, the first decoder layer")
    if not cache.lengths.all():
        raise ValueError(f"{cache.directory}: sample {np.argmin(cache.lengths)}: has no tokens; must have at least one")
    check_fits(cache, target)

    def final_norm(raw):
        padded = jnp.asarray(np.pad(raw, ((0, -len(raw) % BUCKET), (0, 0))))
        return np.asarray(layers.rms_norm(padded, target.params["norm"]["weight"], target.config.rms_norm_eps))[:len(raw)]

    return Features(cache, final_norm=None if cache.final_normed else final_norm)


def check_options(options, data):
    """Raises ValueError that names the field for a ``features`` section that contradicts itself or the ``data`` section."""
    maker = options.made_by
    if maker is not None and maker not in MAKERS:
        raise ValueError(f"features.made_by: {maker!r}; allowed: {', '.join(map(repr, MAKERS))}, or None for this program")
    if maker is not None and not options.cached:
        raise ValueError(f"features.cached: False; features.made_by = {maker!r} needs True")
    if maker is not None and not options.directory:
        raise ValueError(f"features.directory: None; features.made_by = {maker!r} needs one")
    for name in ("layer_ids", "layer_id_base", "final_normed"):
        if (options[name] is None) == (maker == "speculators"):
            raise ValueError(f"features.{name}: {options[name]}; must be given for features.made_by = 'speculators', whose "
                             "files do not say it, and for nothing else")
    if maker == "deepspec" and data.tokens:
        raise ValueError(f"data.tokens: {data.tokens}; must be None with features.made_by = 'deepspec', whose cache has its "
                         "own tokens")


def documents_of(cache):
    """The `Documents` of a `TargetCache`: its tokens and loss masks, but for the first token, which nothing predicts."""
    samples = (cache[i] for i in range(len(cache)))
    return Documents.pack([(s.input_ids, (s.loss_mask != 0) & (np.arange(len(s.loss_mask)) > 0), "") for s in samples])


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


def fingerprint(target, documents):
    """A hash of tokens, loss masks and lengths, and of a sample of the target's weights."""
    digest = hashlib.sha256()
    for array in (documents.tokens.astype(np.int32), documents.loss_mask, documents.length.astype(np.int64)):
        digest.update(array.tobytes() + b";")
    for leaf in jax.tree.leaves(target.params):
        digest.update(np.asarray(leaf).reshape(-1)[:64].tobytes())
    return digest.hexdigest()
