"""A training run small enough for a test. As a program: python tiny_run.py WORKDIR TOKENS [STEP], killed by SIGKILL
right after the metrics of step STEP are written."""

import os
import signal
import sys

import numpy as np
from ml_collections import config_dict

import pairs
from dspark_jax.data.documents import Documents
from train import loop, metrics_log

VOCABULARY, STEPS = 24, 30


def target():
    return pairs.random_target(seed=2, vocab_size=VOCABULARY, tie_word_embeddings=False, head_spread=0.6)


def write_tokens(path, conversations=24):
    """Chains in which each token has three likely followers; token 0 ends an answer now and then."""
    rng = np.random.default_rng(0)
    followers = rng.integers(0, VOCABULARY, (VOCABULARY, 3))
    rows = []
    for i in range(conversations):
        chain = [int(rng.integers(1, VOCABULARY))]
        for _ in range(int(rng.integers(20, 45))):
            chain.append(int(followers[chain[-1], rng.integers(3)]))
        cut = int(rng.integers(3, 8))
        rows.append((chain, np.arange(len(chain)) >= cut, "gsm8k" if i % 3 else "chat"))
    Documents.pack(rows).save(path)


def config(tokens):
    """Every field of configs/, at sizes that train in seconds; written out, so that recipes can change without it."""
    sections = {
        "target": "tests/tiny_run.py", "seed": 3, "steps": STEPS, "checkpoint_every": 5, "init_from": None,
        "init_backbone": None,
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "compute_dtype": "float32", "checkpoint_keep": 2, "checkpoint_keep_every": None, "log_every": 1, "profile": None,
        "data": {"tokens": str(tokens), "conversations": None, "max_length": 40, "row_length": None,
                 "source_weights": {"gsm8k": 3.0}},
        "features": {"cached": True, "directory": None, "made_by": None, "layer_ids": None, "layer_id_base": None,
                     "final_normed": None},
        "drafter": {
            "num_hidden_layers": 1, "intermediate_size": 32, "conv_kernel_size": 0, "block_length": 3,
            "layout": "anchor_first", "target_layer_ids": (0, 1), "mask_token_id": 1, "draft_vocab_size": 20,
            "transition": "vanilla", "transition_init": "bigram", "rank": 8, "execution": "lattice", "candidates": 4,
            "confidence": True, "confidence_with_law": False, "copy_length": 0},
        "batch": {"sequences": 4, "anchors": 6, "anchors_per_chunk": None, "micro_steps": 1},
        "loss": {"ce": 0.1, "l1": 0.9, "confidence": 0.1, "decay": 4.0, "position_weights": "decay"},
        "optimizer": {
            "kind": "adamw", "lr": 1e-2, "warmup_steps": 3, "decay_steps": None, "b1": 0.9, "b2": 0.99, "weight_decay": 0.01, "clip": 1.0},
        "evaluation": {"prompts": 0, "max_new_tokens": 8, "every": 0, "blocks_every": 10},
    }
    return config_dict.ConfigDict(sections)


def main(workdir, tokens, kill_at=None):
    if kill_at is not None:
        write = metrics_log.MetricsLog.write

        def write_and_die(self, step, values):
            write(self, step, values)
            if step == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)

        metrics_log.MetricsLog.write = write_and_die
    loop.train(config(tokens), workdir, target())


if __name__ == "__main__":
    main(*sys.argv[1:])
