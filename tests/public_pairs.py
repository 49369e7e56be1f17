"""The tiny published-layout pairs in tests/goldens through the library's own loaders, and edits of such directories."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

import dspark_jax as ds
from dspark_jax import drafter as drafter_lib
from dspark_jax import target as target_lib
from dspark_jax import transitions

GOLDENS = pathlib.Path(__file__).parent / "goldens"
DEEPSPEC = {head: f"dspark/draft_{head}" for head in ("vanilla", "gated", "rnn", "dflash")}
ZLAB = {"v1": "dflash/draft_v1", "v2": "dflash/draft_v2"}
LAYOUT_OF = {name: "deepspec" for name in DEEPSPEC.values()} | {name: "z-lab" for name in ZLAB.values()}


@functools.cache
def target(name):
    """The target of a pair: "dspark/..." Qwen3, "dflash/..." Llama."""
    return ds.load_target(GOLDENS / ("dspark/target" if name.startswith("dspark") else "dflash/target_model"))


@functools.cache
def drafter(name):
    return ds.load_drafter(GOLDENS / name, target(name))


def values(name):
    """A JSON file of the goldens."""
    return json.loads((GOLDENS / name).read_text())


def arrays(name):
    """An npz file of the goldens."""
    return dict(np.load(GOLDENS / name))


def edited_config(name, directory, change):
    """A copy of the checkpoint in ``directory`` whose config.json went through ``change`` (in place)."""
    shutil.copytree(GOLDENS / name, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def edited_tensors(name, directory, change):
    """A copy of the checkpoint in ``directory`` whose dict of tensors went through ``change`` (in place)."""
    source = pathlib.Path(name) if pathlib.Path(name).is_absolute() else GOLDENS / name
    directory.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", directory)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def blocks(pair_target, pair_drafter, sequences, starts):
    """What the drafter computes at rounds of a decoded text, without any cache.

    sequences: lists of token ids, one a prompt; starts: per prompt the positions of the anchors. Returns per
    prompt a list of (hidden [T, D], base logits [T, V], function of the drafted tokens -> corrected logits [T, V]).
    """
    config, count = pair_drafter.config, max(map(len, starts))
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    anchors, keep = np.zeros((len(starts), count), np.int32), np.zeros((len(starts), count), bool)
    for row, (sequence, positions) in enumerate(zip(sequences, starts)):
        tokens[row, :len(sequence)] = sequence
        anchors[row, :len(positions)], keep[row, :len(positions)] = positions, True
    _, tapped = target_lib.forward(pair_target.config, pair_target.params, jnp.asarray(tokens), config.target_layer_ids)
    run = jax.jit(drafter_lib.training_hidden, static_argnums=0)
    features = jnp.concatenate(tapped, -1)
    hidden = run(config, pair_drafter.params, pair_drafter.embedding, features, tokens, anchors, keep)
    logits = drafter_lib.base_logits(config, pair_drafter.head_rows, hidden)
    rule, table = transitions.get_transition(config.transition), pair_drafter.params.get("transition", {})

    def corrected(b, n, drafted):
        predecessors = np.concatenate([[tokens[b, anchors[b, n]]], drafted[:-1]]).astype(np.int32)
        return transitions.teacher_forced_logits(rule, table, logits[b, n], predecessors, hidden[b, n])

    return [[(np.asarray(hidden[b, n]), np.asarray(logits[b, n]), functools.partial(corrected, b, n))
             for n in range(len(positions))] for b, positions in enumerate(starts)]
