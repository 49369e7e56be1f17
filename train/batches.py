"""Batches of token sequences as a pure function of (seed, step), so that a resumed run sees what it would have seen."""

import numpy as np


def choose(lengths, weights, batch, seed, step):
    """Indices int [batch] of the sequences of one step: without replacement, probability proportional to
    weight * length (anchors are drawn per sequence, so this makes them roughly uniform over tokens where weights are 1)."""
    p = np.asarray(lengths, np.float64) * weights
    return np.random.default_rng([seed, step]).choice(len(p), size=batch, replace=False, p=p / p.sum())


def assemble(sequences, prompt_lengths, rows, chosen, length):
    """-> dict of tokens int32 [B, S], loss_mask float32 [B, S] (1 on answer tokens), features bfloat16 [B, S, W] or None.

    ``rows(i)`` gives the stored feature rows of sequence i, or ``rows`` is None. Longer sequences are cut at S.
    """
    tokens = np.zeros((len(chosen), length), np.int32)
    loss_mask = np.zeros((len(chosen), length), np.float32)
    features = None
    for b, i in enumerate(chosen):
        s = sequences[i][:length]
        tokens[b, :len(s)] = s
        loss_mask[b, prompt_lengths[i]:len(s)] = 1
        if rows is not None:
            r = rows(i)[:length]
            if features is None:
                features = np.zeros((len(chosen), length, r.shape[1]), r.dtype)
            features[b, :len(s)] = r
    return {"tokens": tokens, "loss_mask": loss_mask, "features": features}
