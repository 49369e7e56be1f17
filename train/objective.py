"""One training step: anchors, blocks, both heads, the loss and the update, as pure functions.

B sequences, S positions, N anchors per sequence, T draft positions, V target vocabulary, Vd draft vocabulary, D model
width, M candidates per position.

``frozen``, what is not trained: "embedding" [V, D], "head_rows" [Vd, D], "target_to_draft" int [V] (-1: not in the
draft vocabulary); with a reduced draft vocabulary "draft_to_target" int [Vd] and, where batches have no log-normalisers,
"target_head" [V, D], otherwise None; with the target in the program "target".
``batch``: tokens, loss_mask [B, S], features [B, S, (taps + 1) * D], whose last D columns are the final-normed state;
with stored features log_normalizers [B, S], of the target's law over V; of packed rows also documents int [B, S]
(see `dspark_jax.packing`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from dspark_jax import anchors as anchors_lib
from dspark_jax import candidates, chunks, copying, divergences, layers, losses, packing, sharding, transitions
from dspark_jax.confidence import law_term
from dspark_jax.drafter import base_logits, block_confidence, statistics_of_law, training_hidden
from dspark_jax.loss_weights import LossWeights, draft_weights, loss_denominators
from train import features as features_lib


PARTS = ("backbone", "transition", "copying", "confidence")  # of a drafter's parameters
MUON_RMS = 0.2  # of an update at rate 1, which is what AdamW's are like


def make_optimizer(options, steps, trained=PARTS):
    """The optimizer that ``options.kind`` names, with linear warm-up, cosine decay to zero and clipping by the global norm, for
    the ``trained`` parts.

    "adamw": AdamW. "muon": Muon (optax.contrib.muon), whose updates are orthogonal, for the backbone's matrices, with updates
    as large as AdamW's are (Liu et al., 2025), and AdamW with Nesterov's momentum for everything else.
    The decay ends at ``options.decay_steps``, or with the run, after ``steps``, where that is None. A run that ends
    earlier keeps a high rate for another one to go on from.
    """
    decay_steps = options.decay_steps or steps
    if not 0 <= options.warmup_steps < decay_steps:
        raise ValueError(f"optimizer.warmup_steps: {options.warmup_steps}; must lie in [0, steps = {decay_steps})")
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.lr, options.warmup_steps, decay_steps, 0.0)
    if options.kind == "adamw":
        rule = optax.adamw(schedule, b1=options.b1, b2=options.b2, weight_decay=options.weight_decay)
    elif options.kind == "muon":
        rule = optax.contrib.muon(
            schedule, weight_decay=options.weight_decay, adam_b1=options.b1, adam_b2=options.b2,
            adam_weight_decay=options.weight_decay, consistent_rms=MUON_RMS, muon_weight_dimension_numbers=_matrices)
    else:
        raise ValueError(f"optimizer.kind: {options.kind!r}; allowed: 'adamw', 'muon'")
    update = optax.chain(optax.clip_by_global_norm(options.clip), rule)
    if tuple(trained) == PARTS:
        return update
    return optax.multi_transform({True: update, False: optax.set_to_zero()},
                                 lambda params: {name: name in trained for name in params})


def _matrices(params):
    """What Muon takes: which axes of a weight matrix of the backbone are its rows and columns, None for other arrays."""
    def one(path, leaf):
        is_matrix = path[0].key == "backbone" and path[-1].key == "weight" and leaf.ndim == 2
        return optax.contrib.MuonDimensionNumbers() if is_matrix else None
    return jax.tree_util.tree_map_with_path(one, params)


def loss_weights(options):
    """The `LossWeights` of a training config's ``loss`` section; fields left out have their defaults."""
    allowed = [field.name for field in dataclasses.fields(LossWeights)]
    for name in options:
        if name not in allowed:
            raise ValueError(f"loss.{name}: unknown field; allowed: {', '.join(allowed)}")
    return LossWeights(**options)


def with_features(batch, frozen, online):
    """The batch with features that the target makes now: ``online`` is (target config, taps). None: as it is."""
    if online is None:
        return batch
    rows = features_lib.rows_of(online[0], frozen["target"], batch["tokens"], online[1], batch.get("documents"))
    return batch | {"features": rows}


def sample_blocks(config, batch, target_to_draft, key, anchors):
    """`blocks_at` up to ``anchors`` random anchors per sequence, of packed rows shared out among the documents."""
    return blocks_at(config, batch, target_to_draft, *anchors_lib.sample_anchors(
        key, _supervised(batch), anchors, batch.get("documents")))


def blocks_at(config, batch, target_to_draft, anchors, keep):
    """What blocks at these anchors predict: "anchors", "keep" [B, N]; "predecessors" (target ids), "labels" (draft
    ids), "mask" (supervised drafts), "reached" (those and what follows them directly: drafts that verification can come
    to), "sources" (positions at which the target predicts the labels) [B, N, T]."""
    T, tokens = config.block_length, batch["tokens"]
    labels = target_to_draft[anchors_lib.labels(tokens, anchors, keep, T)]
    # A draft behind a token that can't be drafted is never reached: the running AND goes on over the draft vocabulary.
    supervised = anchors_lib.evaluation_mask(_supervised(batch), anchors, keep, T)
    mask = jnp.cumprod(supervised & (labels >= 0), axis=-1).astype(bool)
    reached = supervised & jnp.pad(mask[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True)
    return {
        "anchors": anchors, "keep": keep, "predecessors": anchors_lib.predecessors(tokens, anchors, keep, T),
        "labels": jnp.maximum(labels, 0), "mask": mask, "reached": reached,
        "sources": anchors_lib.target_indices(anchors, keep, T, tokens.shape[1])}


def _supervised(batch):
    documents = batch.get("documents")
    return batch["loss_mask"] if documents is None else packing.supervised(batch["loss_mask"], documents)


def head_inputs(config, weights, params, frozen, batch, blocks):
    """What the heads and the loss of `sum_in_chunks` work on: (shared, rows, fixed, fixed_rows)."""
    width, predecessors = config.backbone.hidden_size, blocks["predecessors"]
    features = batch["features"].astype(params["backbone"]["fc"]["weight"].dtype)
    transition, table = transitions.get_transition(config.transition), params.get("transition", {})
    hidden = training_hidden(config, params, frozen["embedding"], features[..., :-width], batch["tokens"],
                             blocks["anchors"], blocks["keep"], batch.get("documents"))
    rows = {"hidden": hidden, "phi": transitions.teacher_forced_phi(transition, table, predecessors, hidden),
            "confidence": block_confidence(config, params, hidden, predecessors)}
    if weights.candidates and weights.candidates_stop_gradient:
        rows["candidate_phi"] = transitions.teacher_forced_phi(
            transition, table, predecessors, jax.lax.stop_gradient(hidden))
    fixed_rows = {"final": anchors_lib.gather(features[..., -width:], blocks["sources"]), "predecessors": predecessors,
                  "labels": blocks["labels"], "mask": blocks["mask"], "reached": blocks["reached"]}
    if config.copy_length:
        copied = copied_at(params, frozen, batch, blocks, hidden)
        rows["copy_bonus"] = copied.bonus
        fixed_rows |= {"copy_before": copied.before, "copy_ids": copied.ids, "copy_agreement": copied.agreement}
    if "log_normalizers" in batch:
        fixed_rows["log_normalizer"] = anchors_lib.gather(batch["log_normalizers"], blocks["sources"])
    shared = {name: table[name] for name in ("successor",) if name in table}
    if config.confidence and config.confidence_with_law:
        shared["law"] = params["confidence"]["law"]
    return shared, rows, {name: frozen[name] for name in ("head_rows", "target_head")}, fixed_rows


def copied_at(params, frozen, batch, blocks, hidden):
    """The `copying.Copied` [B, N, T] of blocks, from the tokens of their own documents up to their anchors."""
    documents, anchors = batch.get("documents"), blocks["anchors"]
    begin = jnp.zeros_like(anchors)
    if documents is not None:
        begin = anchors - anchors_lib.gather(packing.positions(documents), anchors)
    to_draft = lambda tokens: jnp.where(tokens >= 0, frozen["target_to_draft"][tokens], -1)
    one = lambda text, last, hidden, begin: copying.behind(params["copying"], text, last, hidden, to_draft, begin)
    return jax.vmap(jax.vmap(one, in_axes=(None, 0, 0, 0)))(batch["tokens"], anchors, hidden, begin)


def copied_of(rows, fixed_rows):
    """The `copying.Copied` of a chunk; None for a drafter without the term."""
    if "copy_bonus" not in rows:
        return None
    return copying.Copied(fixed_rows["copy_before"], fixed_rows["copy_ids"], rows["copy_bonus"], fixed_rows["copy_agreement"])


def laws(config, shared, rows, fixed, fixed_rows):
    """Base logits, logits and the target's logits, [..., T, Vd], and the log-normaliser of its law over all its
    tokens [..., T], None where all can be drafted.

    Without that one accept rates, and so the labels of the confidence head, would not be what verification will see, but
    too high. It is stored beside the features, or costs a product with the whole vocabulary.
    """
    base = base_logits(config, fixed["head_rows"], rows["hidden"])
    logits = base + transitions.bias(shared, rows["phi"])
    if (copied := copied_of(rows, fixed_rows)) is not None:
        logits += copying.term(copied, fixed_rows["predecessors"], jnp.arange(logits.shape[-1]))
    target_logits, log_normalizer = layers.table_logits(fixed_rows["final"], fixed["head_rows"]), None
    if config.draft_vocab_size < config.vocab_size:
        log_normalizer = fixed_rows.get("log_normalizer")
        if log_normalizer is None:
            log_normalizer = features_lib.log_normalizer(fixed["target_head"], fixed_rows["final"])
    return base, logits, target_logits, log_normalizer


def drafted_among(config, base, choose, copied=None):
    """bool [..., T, Vd], the best of the base logits and the ``copied`` token, where drafts are drawn among them, which loses much
    of a flat law; None where they are drawn from all tokens. choose: what finds the candidates (`dspark_jax.candidates.Choice`).
    """
    M = config.usable_candidates
    if config.execution != "lattice" or M == config.draft_vocab_size:
        return None
    ids, best = choose(jax.lax.stop_gradient(base), M)
    if copied is None:
        return base >= best[..., -1:]
    kept, _ = copying.admit(ids, best, base, copied)
    tokens = jnp.arange(base.shape[-1])
    dropped = jnp.where(kept[..., -1:] == ids[..., -1:], -1, ids[..., -1:])  # for the copied token
    return ((base >= best[..., -1:]) & (tokens != dropped)) | (tokens == copied.ids[..., None])


def confidence_and_accept_rate(config, shared, rows, fixed_rows, among, logits, target_logits, log_normalizer, choose):
    """Of drafts drawn ``among`` some tokens (`drafted_among`): the confidence logits [..., T], None without such a head, and the
    chance alpha [..., T] that each is accepted, None where they are drawn from all tokens. choose: as in `drafted_among`."""
    confidence, accept, scores, log_sum = rows["confidence"], None, logits, None
    if among is not None:
        accept = divergences.accept_rate_among(logits, among, target_logits, log_normalizer)
        scores, log_sum = jnp.where(among, logits, -jnp.inf), jax.nn.logsumexp(logits, axis=-1)
    if "law" in shared:
        seen = statistics_of_law(jnp.arange(scores.shape[-1]), scores, log_sum, fixed_rows["predecessors"],
                                 copied_of(rows, fixed_rows), choose)
        confidence = confidence + law_term(shared["law"], seen)
    return confidence, accept


def chunk_loss(config, weights, shared, rows, fixed, fixed_rows, choose=candidates.top_candidates):
    """The loss and the terms of some anchors, for `sum_in_chunks`. ``fixed`` also has "weights" and "denominators";
    choose: as in `drafted_among`."""
    base, logits, target_logits, log_normalizer = laws(config, shared, rows, fixed, fixed_rows)
    labels, mask = fixed_rows["labels"], fixed_rows["mask"]
    w = draft_weights(weights, logits, labels, mask)
    among = drafted_among(config, base, choose, copied_of(rows, fixed_rows))
    confidence, accept = confidence_and_accept_rate(
        config, shared, rows, fixed_rows, among, logits, target_logits, log_normalizer, choose)
    terms = losses.drafter_terms(logits, target_logits, labels, mask, confidence, weights.decay, weights=w,
                                 log_normalizer=log_normalizer, reached=fixed_rows["reached"], accept=accept)
    if weights.unary:
        terms["unary"] = losses.weighted(w, divergences.cross_entropy(base, labels))
    if weights.kl:
        terms["kl"] = losses.weighted(w, divergences.kl_divergence(logits, target_logits))
    if weights.candidates:
        phi = rows.get("candidate_phi", rows["phi"])
        terms |= candidate_terms(config, weights, shared, phi, base, labels, mask, w, choose, copied_of(rows, fixed_rows),
                                 fixed_rows["predecessors"])
    return losses.weighted_sum(terms, fixed["weights"], fixed["denominators"]), terms


def candidate_terms(config, weights, shared, phi, base, labels, mask, w, choose, copied=None, predecessors=None):
    """The candidates term, and how often the label is a candidate and is the best of them: [T] each.

    choose: as in `drafted_among`."""
    M = config.usable_candidates
    if weights.candidates_stop_gradient:
        base = jax.lax.stop_gradient(base)
    ids, best = copying.admit(*choose(base, M), base, copied)
    # The label's own score stands last; it is used where the label is no candidate and is injected.
    rated = jnp.concatenate([ids, labels[..., None]], axis=-1)
    scores = jnp.concatenate([best, divergences.pick(base, labels)[..., None]], axis=-1)
    scores += transitions.bias_at(shared, phi, rated)
    if copied is not None:
        scores += copying.term(copied, predecessors, rated)
    scores, label_scores = scores[..., :M], scores[..., M]
    found, index = losses.locate_label(ids, labels)
    drafts, leading = mask.astype(jnp.float32), tuple(range(mask.ndim - 1))
    return {
        "candidates": losses.candidate_cross_entropy(scores, ids, labels, w, weights.missing_label, label_scores),
        "candidate_recall": losses.weighted(drafts, found, leading),
        "candidate_accuracy": losses.weighted(drafts, found & (jnp.argmax(scores, axis=-1) == index), leading)}


def batch_loss(config, weights, params, frozen, batch, blocks, at, denominators, size, choose=candidates.top_candidates):
    """(loss, terms) of some sequences. at: weights of the terms (`LossWeights.at`); denominators: of the whole batch;
    size: anchors per chunk; choose: as in `candidate_terms`."""
    shared, rows, fixed, fixed_rows = head_inputs(config, weights, params, frozen, batch, blocks)
    fixed |= {"weights": at, "denominators": denominators}
    with jax.named_scope("heads"):
        return chunks.sum_in_chunks(
            functools.partial(chunk_loss, config, weights, choose=choose), size, shared, rows, fixed, fixed_rows)


def chunk_size(config, mesh, sequences, anchors):
    """Anchors per chunk where ``sequences`` and the vocabulary are spread over ``mesh``."""
    here = sharding.sequences_per_device(mesh, sequences, 1)
    return chunks.anchors_per_chunk(here, anchors, config.block_length, -(-config.vocab_size // mesh.shape["tensor"]))


def make_step(config, weights, optimizer, *, anchors, anchors_per_chunk=None, micro_steps=1, online=None, mesh=None,
              dtype=None, trained=PARTS):
    """-> step(params, opt_state, frozen, batch, key, number) -> (params, opt_state, metrics), number counting from 0.

    weights: `LossWeights`. anchors: N. anchors_per_chunk: anchors whose logits exist at one time; None: as many as fit
    into `chunks.CHUNK_BYTES`. micro_steps: parts that the batch is computed in; the update is that of the whole batch.
    A batch without a draft that could be verified changes nothing ("blocks" among its metrics is 0). ``online`` is None
    (features come with the batch) or (target config, taps): the target runs in the same program, with frozen["target"].
    trained: the parts of the parameters that have a gradient; the optimizer must leave the others alone.
    mesh: where the arrays lie (`dspark_jax.sharding`); None: on one device. dtype: what forward and backward compute in;
    None: the dtype of the parameters. They, the sum of their gradients and the optimizer's state stay what they are.
    """
    mesh = mesh or sharding.one_device()

    def step(params, opt_state, frozen, batch, key, number):
        blocks = sample_blocks(config, batch, frozen["target_to_draft"], key, anchors)
        denominators, at = loss_denominators(weights, blocks["mask"], blocks["reached"]), weights.at(number)
        if not config.confidence:
            at.pop("confidence", None)
        sequences = len(batch["tokens"]) // micro_steps
        size = anchors_per_chunk or chunk_size(config, mesh, sequences, anchors)
        choose = candidates.over_mesh(mesh, "tensor", sharding.BATCH)

        def part(batch, blocks):
            tables = sharding.gather(mesh, frozen, dtype)
            batch = with_features(batch, tables, online)

            def loss(params):
                params = {name: part if name in trained else jax.lax.stop_gradient(part) for name, part in params.items()}
                return batch_loss(config, weights, sharding.gather(mesh, params, dtype), tables, batch, blocks, at,
                                  denominators, size, choose)

            return jax.value_and_grad(loss, has_aux=True)(params), None

        # Every part takes every micro_steps-th sequence: where sequences are sharded, each device keeps its own.
        split = lambda x: jnp.moveaxis(x.reshape(sequences, micro_steps, *x.shape[1:]), 1, 0)
        ((loss, terms), gradients), _ = chunks.accumulate(part, *jax.tree.map(split, (batch, blocks)))
        updates, new_state = optimizer.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        count = denominators["expected_accepted_length"]
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), new, (params, opt_state))
        metrics = losses.metrics_of(terms)
        return params, opt_state, metrics | {"loss": loss, "gradient_norm": optax.tree.norm(gradients), "blocks": count}

    return step
