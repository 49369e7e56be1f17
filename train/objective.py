"""One training step: anchors, blocks, both heads, the loss and the update, as pure functions.

B sequences, S positions, N anchors per sequence, T draft positions, Vd draft vocabulary, D model width.
"""

import jax
import jax.numpy as jnp
import optax

from dspark_jax import anchors as anchors_lib
from dspark_jax import losses, transitions
from dspark_jax.drafter import base_logits, block_confidence, training_hidden
from train import features as features_lib


def make_optimizer(options, steps):
    """AdamW with linear warm-up, cosine decay to zero and clipping by the global norm.

    The decay ends at ``options.decay_steps``, or with the run, after ``steps``, where that is None. A run that ends
    earlier keeps a high rate for another one to go on from.
    """
    decay_steps = options.decay_steps or steps
    if not 0 <= options.warmup_steps < decay_steps:
        raise ValueError(f"optimizer.warmup_steps: {options.warmup_steps}; must lie in [0, steps = {decay_steps})")
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.lr, options.warmup_steps, decay_steps, 0.0)
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(schedule, b1=options.b1, b2=options.b2, weight_decay=options.weight_decay))


def terms(config, params, frozen, batch, key, anchors_per_sequence, decay):
    """Undivided loss terms of one batch (`losses.drafter_terms`).

    ``frozen``: "embedding" [V, D], "head_rows" [Vd, D], "target_to_draft" int [V] (-1: not in the draft vocabulary).
    ``batch``: tokens, loss_mask [B, S], features [B, S, (taps + 1) * D], whose last D columns are the final-normed state.
    With a reduced draft vocabulary the target's law is taken within it, so accept rates, the accepted length expected
    from them and the labels of the confidence head are a little higher than what decoding will see.
    """
    T = config.block_length
    tokens, features = batch["tokens"], batch["features"].astype(jnp.float32)
    width = config.backbone.hidden_size
    anchors, keep = anchors_lib.sample_anchors(key, batch["loss_mask"], anchors_per_sequence)
    hidden = training_hidden(config, params, frozen["embedding"], features[..., :-width], tokens, anchors, keep)
    predecessors = anchors_lib.predecessors(tokens, anchors, keep, T)
    logits = transitions.teacher_forced_logits(
        transitions.get_transition(config.transition), params.get("transition", {}),
        base_logits(config, frozen["head_rows"], hidden), predecessors, hidden)

    labels = frozen["target_to_draft"][anchors_lib.labels(tokens, anchors, keep, T)]
    # A draft behind a token that can't be drafted is never reached: the running AND goes on over the draft vocabulary.
    mask = anchors_lib.evaluation_mask(batch["loss_mask"], anchors, keep, T)
    mask = jnp.cumprod(mask & (labels >= 0), axis=-1).astype(bool)
    final = anchors_lib.gather(features[..., -width:], anchors_lib.target_indices(anchors, keep, T, tokens.shape[1]))
    # The target's law given that the token is in the draft vocabulary.
    target_logits = jax.lax.stop_gradient(final @ frozen["head_rows"].T)
    confidence = block_confidence(config, params, hidden, predecessors)
    return losses.drafter_terms(logits, target_logits, jnp.maximum(labels, 0), mask, confidence, decay)


def make_step(config, loss, anchors_per_sequence, optimizer, online=None):
    """-> step(params, opt_state, frozen, batch, key) -> (params, opt_state, metrics). ``online`` is None (features come
    with the batch) or (target config, taps): the target runs in the same program, with frozen["target"]."""

    def step(params, opt_state, frozen, batch, key):
        if online is not None:
            batch = batch | {"features": features_lib.rows_of(online[0], frozen["target"], batch["tokens"], online[1])}

        def objective(params):
            sums = terms(config, params, frozen, batch, key, anchors_per_sequence, loss.decay)
            weights = {"ce": loss.ce, "l1": loss.l1, "confidence": loss.confidence if config.confidence else 0.0}
            return losses.weighted_sum(sums, weights), losses.metrics_of(sums)

        (value, metrics), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        metrics = metrics | {"loss": value, "gradient_norm": optax.tree.norm(gradients)}
        return optax.apply_updates(params, updates), opt_state, metrics

    return step
