"""Batches of documents as a pure function of (seed, step), so that a resumed run sees what it would have seen."""

import numpy as np


def choose(lengths, weights, batch, seed, step):
    """Indices int [batch] of the documents of one step, one a row: without replacement, probability proportional to
    weight * length (anchors are drawn per document, so this makes them roughly uniform over tokens where weights are
    1)."""
    p = np.asarray(lengths, np.float64) * weights
    return np.random.default_rng([seed, step]).choice(len(p), size=batch, replace=False, p=p / p.sum())


def choose_packed(lengths, weights, batch, length, seed, step):
    """Lists of the documents of one step, one for each of ``batch`` rows of ``length`` tokens, none of them empty.

    Documents are drawn as in `choose`, up to the first with which there would be more tokens than places. The longest
    is placed first, each into the row that is emptiest then; one that fits nowhere is left for another step.
    ``lengths``: at most ``length``, those of at least ``batch`` documents with a weight above 0.
    """
    lengths = np.asarray(lengths)
    with np.errstate(divide="ignore"):  # the order of exponential waiting times is that of draws without replacement
        waiting = np.random.default_rng([seed, step]).exponential(size=len(lengths)) / (lengths * weights)
    order = np.argsort(waiting, kind="stable")[:np.count_nonzero(weights)]
    drawn = order[:np.searchsorted(np.cumsum(lengths[order]), batch * length, side="right")]
    rows, free = [[] for _ in range(batch)], np.full(batch, length)
    for i in drawn[np.argsort(-lengths[drawn], kind="stable")]:
        emptiest = np.argmax(free)
        if lengths[i] <= free[emptiest]:
            rows[emptiest].append(int(i))
            free[emptiest] -= lengths[i]
    return rows


def assemble(documents, features_of, chosen, length, max_length):
    """The arrays of a batch of B rows of S = ``length`` tokens, documents cut after ``max_length``.

    documents: `dspark_jax.data.documents.Documents`. features_of: gives the stored feature rows and log-normalisers of
    document i (`train.features.Features.of`), the latter None where nobody stored them; None: there are no features. chosen: one document for each row, or where rows are
    packed a list of them.

    -> tokens int32 [B, S], loss_mask float32 [B, S], features bfloat16 [B, S, W] and log_normalizers float32
    [B, S] or None, and documents int32 [B, S], which document of its row each token belongs to, counted from 1, padding
    0; None where rows are not packed.
    """
    packed = np.ndim(chosen[0]) == 1
    tokens, numbers = np.zeros((2, len(chosen), length), np.int32)
    loss_mask = np.zeros((len(chosen), length), np.float32)
    features = log_normalizers = None
    for b, row in enumerate(chosen):
        end = 0
        for number, i in enumerate(np.atleast_1d(row), 1):
            ids, mask = documents.document(i)
            begin, end = end, end + min(len(ids), max_length)
            size = end - begin
            tokens[b, begin:end], loss_mask[b, begin:end] = ids[:size], mask[:size]
            numbers[b, begin:end] = number
            if features_of is not None:
                rows, norms = features_of(i)
                if features is None:
                    features = np.zeros((len(chosen), length, rows.shape[1]), rows.dtype)
                    log_normalizers = None if norms is None else np.zeros((len(chosen), length), np.float32)
                features[b, begin:end] = rows[:size]
                if log_normalizers is not None:
                    log_normalizers[b, begin:end] = norms[:size]
    return {"tokens": tokens, "loss_mask": loss_mask, "features": features, "log_normalizers": log_normalizers,
            "documents": numbers if packed else None}
