"""The jitted programs of a training run, and where their arrays lie on its mesh.

The loop gives them arrays, `train.compile` gives them shapes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import drafter as drafter_lib
from dspark_jax import sharding
from dspark_jax.checkpoints import targets
from train import block_evaluation, objective

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Programs:
    """``step(params, opt_state, frozen, batch, number)`` and ``evaluate(params, frozen, batch, number)``, of
    `train.objective` and `train.block_evaluation`, with keys that are a function of (seed, number); both read the arrays
    where they lie. ``params``, ``opt_state`` and ``frozen``: their shapes, each with its sharding; ``start(params)`` gives
    the state."""

    mesh: jax.sharding.Mesh
    params: Any
    opt_state: Any
    frozen: Any
    start: Callable
    step: Callable
    evaluate: Callable


def build(config, model, target_config, mesh):
    """The `Programs` of a training config for a `DrafterConfig` and a `TargetConfig`.

    Raises ValueError for sizes that the mesh does not divide.
    """
    sharding.sequences_per_device(mesh, config.batch.sequences, config.batch.micro_steps)
    loss = objective.loss_weights(config.loss)
    trained = tuple(config.drafter.get("trained", objective.PARTS))
    if not trained or not set(trained) <= set(objective.PARTS):
        raise ValueError(f"drafter.trained: {trained}; allowed: some of {', '.join(objective.PARTS)}")
    optimizer = objective.make_optimizer(config.optimizer, config.steps, trained)
    online = None if config.features.cached else (target_config, tuple(config.drafter.target_layer_ids))
    options = {"anchors": config.batch.anchors, "anchors_per_chunk": config.batch.anchors_per_chunk, "online": online,
               "mesh": mesh, "dtype": compute_dtype(config)}
    update = objective.make_step(
        model, loss, optimizer, micro_steps=config.batch.micro_steps, trained=trained, **options)
    metrics_of = block_evaluation.make_evaluation(model, **options)
    params = laid(mesh, drafter_lib.abstract_params(model))
    opt_state = laid(mesh, jax.eval_shape(optimizer.init, params))
    frozen = laid(mesh, frozen_shapes(config, model, target_config))
    at = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
    whole = sharding.replicated(mesh)

    def key(number):
        return jax.random.fold_in(jax.random.key(config.seed), number)

    def step(params, opt_state, frozen, batch, number):
        return update(params, opt_state, frozen, batch, key(number), number)

    def evaluate(params, frozen, batch, number):
        return metrics_of(params, frozen, batch, key(number))

    return Programs(
        mesh, params, opt_state, frozen, jax.jit(optimizer.init, out_shardings=at(opt_state)),
        jax.jit(step, donate_argnums=(0, 1), out_shardings=(at(params), at(opt_state), whole)),
        jax.jit(evaluate, out_shardings=whole))


def frozen_shapes(config, model, target_config):
    """The shapes of what is not trained (``frozen`` in `train.objective`)."""
    V, Vd, D = target_config.vocab_size, model.draft_vocab_size, target_config.hidden_size
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    frozen = {"embedding": array(jnp.float32, V, D), "head_rows": array(jnp.float32, Vd, D),
              "target_to_draft": array(jnp.int32, V), "draft_to_target": array(jnp.int32, Vd) if Vd < V else None,
              "target_head": array(jnp.float32, V, D) if needs_target_head(config, model) else None}
    if not config.features.cached:
        frozen["target"] = targets.abstract_params(target_config)
    return cast(frozen, compute_dtype(config))


def needs_target_head(config, model):
    """Whether a step has to compute the log-normaliser of the target's law: it is neither that of the draft vocabulary nor
    stored beside the features."""
    return model.draft_vocab_size < model.vocab_size and not has_log_normalizers(config)


def has_log_normalizers(config):
    """Whether batches have the log-normalisers of the target's law: they are stored with the features of `train.features`,
    not with those that other programs make."""
    return config.features.cached and config.features.made_by is None


def cast(tree, dtype):
    """The shapes of a tree with floats in ``dtype``; None: as they are."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype), tree)


def compute_dtype(config):
    """What ``config.compute_dtype`` names, None where the parameters' own dtype is it."""
    name = config.get("compute_dtype", "float32")
    if name not in DTYPES:
        raise ValueError(f"compute_dtype: {name!r}; allowed: {', '.join(DTYPES)}")
    return None if name == "float32" else jnp.dtype(name)


def laid(mesh, tree):
    """The shapes of a tree's arrays, with their shardings."""
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), tree,
                        sharding.shardings(mesh, tree))
