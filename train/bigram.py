"""A start for the transition tables: a low-rank factorisation of the bigram statistics of the training tokens.

With counts n(a, b), unigram law p(b) and a smoothing mass k, the smoothed conditional law is
(n(a,b) + k p(b)) / (n(a) + k). Relative to p(b), and up to a constant of the row that no softmax sees, its logarithm is

    X[a, b] = log(1 + n(a, b) / (k p(b)))

which is zero wherever a pair was not seen: a sparse matrix, of which the best rank-R approximation is A B^T.
"""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg


def factorise(sequences, vocab_size, draft_ids, rank, smoothing=16.0, seed=0):
    """``sequences``: int arrays; ``draft_ids`` int [Vd] -> (A [V, R], B [Vd, R]) float32, with balanced singular values."""
    if not 1 <= rank < min(vocab_size, len(draft_ids)):
        raise ValueError(f"rank: {rank}; must lie in [1, {min(vocab_size, len(draft_ids)) - 1}] for tables that start "
                         "from the bigram statistics")
    a = np.concatenate([s[:-1] for s in sequences]).astype(np.int64)
    b = np.concatenate([s[1:] for s in sequences]).astype(np.int64)
    to_draft = np.full(vocab_size, -1)
    to_draft[draft_ids] = np.arange(len(draft_ids))
    inside = to_draft[b] >= 0
    counts = scipy.sparse.coo_array(
        (np.ones(inside.sum()), (a[inside], to_draft[b[inside]])), shape=(vocab_size, len(draft_ids))).tocsr()
    unigram = np.asarray(counts.sum(axis=0)).ravel() + 1.0
    unigram /= unigram.sum()
    x = counts.tocoo()
    x = scipy.sparse.coo_array((np.log1p(x.data / (smoothing * unigram[x.coords[1]])), x.coords), shape=x.shape).tocsr()
    start = np.random.default_rng(seed).standard_normal(min(x.shape))  # svds otherwise starts at a random vector
    u, s, vt = scipy.sparse.linalg.svds(x, k=rank, v0=start)
    root = np.sqrt(s)
    return (u * root).astype(np.float32), (vt.T * root).astype(np.float32)
