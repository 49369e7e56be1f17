"""What a drafter would do on known text: the metrics of blocks that are too dear for every step.

B sequences, S positions, N anchors per sequence, T draft positions, V target vocabulary, Vd draft vocabulary, D model
width, M candidates per position. ``frozen`` and ``batch`` are those of `train.objective`.
"""

import functools

import jax
import jax.numpy as jnp

from dspark_jax import anchors as anchors_lib
from dspark_jax import candidates, chunks, copying, losses, sharding, transitions
from dspark_jax.lattice import lattice_draft
from dspark_jax.loss_weights import LossWeights
from dspark_jax.path_metrics import path_terms
from dspark_jax.sequential import sequential_draft
from train import objective


def make_evaluation(config, *, anchors, anchors_per_chunk=None, online=None, mesh=None, dtype=None):
    """-> evaluate(params, frozen, batch, key) -> the metrics of `losses.drafter_terms` and `path_metrics.path_terms`.

    Paths are drafted greedily, as ``config.execution`` says. The candidates are the ``config.candidates`` best tokens
    of the base logits under either execution. Arguments as in `objective.make_step`.
    """

    mesh = mesh or sharding.one_device()

    def evaluate(params, frozen, batch, key):
        params, frozen = sharding.gather(mesh, (params, frozen), dtype)
        batch = objective.with_features(batch, frozen, online)
        blocks = objective.sample_blocks(config, batch, frozen["target_to_draft"], key, anchors)
        shared, rows, fixed, fixed_rows = objective.head_inputs(config, LossWeights(), params, frozen, batch, blocks)
        fixed |= {"transition": params.get("transition", {}), "draft_to_target": frozen["draft_to_target"]}
        fixed_rows |= {"anchors": anchors_lib.gather(batch["tokens"], blocks["anchors"])}
        size = anchors_per_chunk or objective.chunk_size(config, mesh, len(batch["tokens"]), anchors)
        _, terms = chunks.sum_in_chunks(
            functools.partial(chunk_metrics, config, mesh=mesh), size, shared, rows, fixed, fixed_rows)
        return losses.metrics_of(terms)

    return evaluate


def chunk_metrics(config, shared, rows, fixed, fixed_rows, mesh):
    """(0, terms) of some anchors, for `sum_in_chunks`. ``fixed`` also has "transition" and "draft_to_target",
    ``fixed_rows`` the "anchors" tokens."""
    base, logits, target_logits, log_normalizer = objective.laws(config, shared, rows, fixed, fixed_rows)
    labels, mask, copied = fixed_rows["labels"], fixed_rows["mask"], objective.copied_of(rows, fixed_rows)
    choose = candidates.over_mesh(mesh, "tensor", sharding.BATCH)
    confidence, accept = objective.confidence_and_accept_rate(
        config, shared, rows, fixed_rows, objective.drafted_among(config, base, choose, copied), logits, target_logits,
        log_normalizer, choose)
    terms = losses.drafter_terms(logits, target_logits, labels, mask, confidence, log_normalizer=log_normalizer,
                                 reached=fixed_rows["reached"], accept=accept)
    ids, _ = copying.admit(*choose(base, config.usable_candidates), base, copied)
    if log_normalizer is None:
        log_normalizer = jax.nn.logsumexp(target_logits, axis=-1)
    at = functools.partial(candidates.scores_at, mesh, "tensor", sharding.BATCH)
    q = jnp.exp(at(target_logits, ids) - log_normalizer[..., None])
    found, _ = losses.locate_label(ids, labels)
    forced = jnp.argmax(logits, axis=-1)
    if config.execution == "lattice":
        best = jnp.argmax(at(logits, ids), axis=-1)
        forced = jnp.take_along_axis(ids, best[..., None], axis=-1)[..., 0]
    draft = functools.partial(_greedy_path, config, candidates.over_mesh(mesh, "tensor"), fixed["transition"],
                              fixed["draft_to_target"])
    path = jax.vmap(jax.vmap(draft), spmd_axis_name=sharding.BATCH)(base, rows["hidden"], fixed_rows["anchors"], copied)
    label_tokens = labels if fixed["draft_to_target"] is None else fixed["draft_to_target"][labels]
    terms |= path_terms(found, jnp.sum(q, axis=-1), forced == labels, path == label_tokens, mask)
    return jnp.zeros(()), terms


def _greedy_path(config, choose, table, draft_to_target, base, hidden, anchor, copied):
    """The tokens [T] (target ids) that one block drafts at temperature 0."""
    block = transitions.get_transition(config.transition), table, base, hidden, anchor, jax.random.key(0), 0.0
    if config.execution == "lattice":
        return lattice_draft(*block, config.candidates, draft_to_target, choose, copied)[0]
    return sequential_draft(*block, draft_to_target, copied)[0]
