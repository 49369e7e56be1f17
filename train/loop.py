"""The training loop: from a config and a work directory to a trained drafter.

Everything random is a function of (seed, step), so a run that was killed goes on from its newest checkpoint and ends with
the parameters it would have had.
"""

import dataclasses
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict

from dspark_jax import drafter as drafter_lib
from dspark_jax import loading, sharding
from dspark_jax.backbone import Attention, BackboneConfig
from dspark_jax.checkpoints import run as run_checkpoints
from dspark_jax.data import chat, sources
from dspark_jax.data.documents import Documents
from train import (
    batches,
    bigram,
    features,
    held_out,
    metrics_log,
    programs,
    run_config,
    signals,
    step_trace,
)


def train(config, workdir, target=None, stop=None):
    """Train as ``config`` says (see configs/) in ``workdir`` -> the final `Drafter`.

    stop: a `signals.StopRequest`. Once it has come, the step is finished and saved, and SystemExit raised.

    Writes there: config.json, drafter.json (what `load_drafter` needs), metrics.jsonl (`train.metrics_log`),
    tensorboard/, checkpoints/, and profile/ where ``config.profile`` names steps. Prints a table at the end. Raises
    ValueError if the directory holds a run with another config.
    """
    workdir, stop = pathlib.Path(workdir), stop or signals.StopRequest()
    workdir.mkdir(parents=True, exist_ok=True)
    mesh, writes = sharding.make_mesh(config.get("mesh", {})), jax.process_index() == 0
    run_config.claim(workdir, config)
    with _whole_arrays(mesh):
        target = target or loading.load_target(config.target)
    model = drafter_config(config.drafter, target.config)  # what is wrong with the config shows before the long work
    drafter_lib.check_fit(model, target.config)
    prompts = held_out.prompts(config.evaluation, target)
    if not 2 <= config.data.max_length <= target.config.max_position_embeddings:
        raise ValueError(f"data.max_length: {config.data.max_length}; must lie in "
                         f"[2, {target.config.max_position_embeddings}], the target's context")
    row_length = config.data.get("row_length")
    if row_length is not None and row_length < config.data.max_length:
        raise ValueError(f"data.row_length: {row_length}; must be at least data.max_length, {config.data.max_length}")
    for name, value in (("checkpoint_every", config.checkpoint_every), ("checkpoint_keep", config.checkpoint_keep),
                        ("checkpoint_keep_every", config.checkpoint_keep_every), ("log_every", config.log_every),
                        ("batch.anchors", config.batch.anchors),
                        ("batch.anchors_per_chunk", config.batch.anchors_per_chunk),
                        ("batch.micro_steps", config.batch.micro_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value}; must be at least 1")
    for name in ("every", "blocks_every"):
        if config.evaluation[name] < 0:
            raise ValueError(f"evaluation.{name}: {config.evaluation[name]}; must be at least 0")
    features.check_options(config.features, config.data)
    step_trace.StepTrace(config.profile, 0, workdir)
    if config.evaluation.prompts and jax.process_count() > 1:
        raise ValueError(f"evaluation.prompts: {config.evaluation.prompts}; only 0 is allowed with several processes")
    program = programs.build(config, model, target.config, mesh)

    # ---------------------------------------------------------------- data
    taps, made = tuple(config.drafter.target_layer_ids), None
    token_file = config.data.tokens or sources.SHIPPED_TOKENS
    if config.features.made_by == "deepspec":
        made, token_file = features.open_made(config.features, target, taps), config.features.directory
        data = features.documents_of(made.cache).first(config.data.conversations or len(made.cache))
    else:
        data = _read_documents(token_file, config.data, target)
        if config.features.made_by:
            made = features.open_made(config.features, target, taps, data)
    if len(data) == 0 or int(data.tokens.max()) >= target.config.vocab_size:
        raise ValueError(f"data.tokens: {token_file}: must hold ids of the target's vocabulary "
                         f"[0, {target.config.vocab_size}), and not be empty")
    weights = np.array([config.data.source_weights.get(s, 1.0) for s in data.source], np.float64)
    kept = np.flatnonzero(weights > 0)
    data, weights = data.where(weights > 0), weights[kept]
    sequences = [data.document(i)[0] for i in range(len(data))]
    lengths = np.minimum(data.length.astype(np.int64), config.data.max_length)
    if not 1 <= config.batch.sequences <= len(data):
        raise ValueError(f"batch.sequences: {config.batch.sequences}; must lie in [1, {len(data)}], "
                         f"the conversations of {token_file} whose source has a weight")
    choose = functools.partial(batches.choose_packed, length=row_length) if row_length else batches.choose
    features_of = None
    if made:
        features_of = lambda i: made.of(kept[i])
    elif config.features.cached:
        directory = pathlib.Path(config.features.directory or workdir / "features")
        with sharding.first_process_first():
            features_of = _compute_features(target, data, taps, directory, config.target, stop).of

    # ------------------------------------------------------------- drafter
    with _whole_arrays(mesh):
        drafter = starting_drafter(config, model, target, data, sequences)
    draft_ids = drafter.draft_to_target
    if writes:
        loading.write_run_file(workdir, model, draft_ids)
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "draft_to_target": draft_ids,
              "target_head": target.head_rows() if programs.needs_target_head(config, model) else None,
              "target_to_draft": inverse(draft_ids, target.config.vocab_size)}
    if not config.features.cached:
        frozen["target"] = target.params

    # ------------------------------------------------------------ sharding
    frozen = sharding.place(frozen, sharding.shardings(mesh, frozen), programs.compute_dtype(config))
    params = sharding.place(drafter.params, sharding.shardings(mesh, drafter.params))
    rows_here = sharding.own_rows(mesh, config.batch.sequences)
    manager = run_checkpoints.open_manager(workdir, config.checkpoint_keep, config.checkpoint_keep_every)
    start, state = run_checkpoints.restore(manager, {"params": params, "opt_state": program.start(params)})
    params, opt_state = state["params"], state["opt_state"]
    if start:
        logging.info("resuming from step %d", start)

    # ---------------------------------------------------------------- loop
    positions = config.batch.sequences * config.batch.anchors * model.block_length
    trace = step_trace.StepTrace(config.profile, start, workdir / "profile")
    with metrics_log.MetricsLog(workdir, start) as log, tqdm.tqdm(
            total=config.steps, initial=start, unit="step", dynamic_ncols=True, smoothing=0.05, disable=not writes) as bar:

        def decode_held_out(done):
            if held_out.is_due(config.evaluation, done, config.steps) and done not in log.held_out:
                bar.set_postfix_str("decoding held-out prompts")
                length = held_out.accepted_length(
                    target, drafter_lib.attach(model, sharding.whole(params), target, draft_ids), prompts,
                    config.evaluation.max_new_tokens, stop)
                if length is not None:
                    log.write(done, {metrics_log.HELD_OUT: round(length, 6)})

        done = start
        decode_held_out(done)
        since, began = done, time.monotonic()
        while not (stopped := stop.agreed()) and done < config.steps:
            step, done = done, done + 1
            chosen = choose(lengths, weights, config.batch.sequences, seed=config.seed, step=step)
            here = [chosen[i] for i in rows_here]
            batch = batches.assemble(data, features_of, here, row_length or config.data.max_length,
                                     config.data.max_length)
            batch = {name: array for name, array in batch.items() if array is not None}
            batch, evaluated = sharding.assemble(mesh, batch, len(chosen)), {}
            trace.before(step)
            if config.evaluation.blocks_every and step % config.evaluation.blocks_every == 0:
                evaluated = program.evaluate(params, frozen, batch, step)  # the blocks of this step, not trained on yet
            params, opt_state, out = program.step(params, opt_state, frozen, batch, step)
            trace.after(step, out)
            if done % config.log_every == 0 or done == config.steps or evaluated:
                out = {name: np.asarray(value).round(6).tolist() for name, value in (evaluated | out).items()}
                out["skipped"] = done - _updates(opt_state)
                out["positions_per_second"] = round(positions * (done - since) / (time.monotonic() - began), 1)
                log.write(done, out)
                bar.set_postfix_str(f"loss {out['loss']:.3f}, accepted length {out['expected_accepted_length']:.3f}, "
                                    f"{out['positions_per_second']:.0f} positions/s", refresh=False)
                since, began = done, time.monotonic()
            bar.update()
            if done % config.checkpoint_every == 0 or done == config.steps:
                run_checkpoints.save(manager, done, {"params": params, "opt_state": opt_state})
            if held_out.is_due(config.evaluation, done, config.steps):
                decode_held_out(done)
                since, began = done, time.monotonic()
    trace.close()
    if stopped:
        run_checkpoints.save(manager, done, {"params": params, "opt_state": opt_state})
    manager.close()  # waits for what is being saved
    if stopped:
        signals.leave(stopped, f"step {done} of {config.steps} is saved in {workdir}")
    _report(workdir, len(prompts))
    return drafter_lib.attach(model, sharding.whole(params), target, draft_ids)


def _whole_arrays(mesh):
    """Where arrays are made before they are spread over a mesh: in host memory where it has several devices, none of
    which needs to have room for a whole target."""
    return jax.default_device(jax.local_devices(backend="cpu")[0] if mesh.size > 1 else None)


def _read_documents(file, options, target):
    """The `Documents` of a training config's ``data`` section, from chat data (.jsonl) or from a token file (.npz)."""
    vocab_size, count = target.config.vocab_size, options.conversations
    if str(file).endswith(".jsonl"):
        data, report = chat.read_documents(
            file, target.tokenizer, vocab_size, options.max_length, count,
            progress=functools.partial(tqdm.tqdm, desc="chat data", unit="row", dynamic_ncols=True))
        if jax.process_index() == 0:
            print(report)
        return data
    data = Documents.load(file)
    return data if count is None else data.first(count)


def _updates(opt_state):
    """Steps that changed the parameters: one whose batch has nothing supervised leaves the optimizer as it was."""
    return int(optax.tree.get_all_with_path(opt_state, "count")[0][1])


def _report(workdir, prompts):
    if jax.process_index() == 0:
        lines = metrics_log.read(workdir)
        print(metrics_log.table(lines))
        if lengths := list(metrics_log.held_out(lines).values()):
            print(f"accepted length on {prompts} held-out prompts: {lengths[0]:.3f} before training, "
                  f"{lengths[-1]:.3f} after")


def drafter_config(options, target):
    """The `DrafterConfig` of a training config's ``drafter`` section for a `TargetConfig`: head sizes are the target's."""
    backbone = BackboneConfig(
        hidden_size=target.hidden_size, intermediate_size=options.intermediate_size or target.intermediate_size,
        num_hidden_layers=options.num_hidden_layers, num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads, head_dim=target.head_dim, rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling, rms_norm_eps=target.rms_norm_eps, conv_kernel_size=options.conv_kernel_size,
        conv_group_size=options.get("conv_group_size", 16),
        attention=tuple(Attention(**kind) for kind in options.get("attention", ())))
    scales = {name: options.get(name, default) for name, default in (
        ("output_multiplier", 1.0), ("final_logit_softcapping", 0.0), ("input_embedding_scale", 1.0))}
    return drafter_lib.DrafterConfig(
        backbone=backbone, vocab_size=target.vocab_size,
        draft_vocab_size=options.draft_vocab_size or target.vocab_size, block_length=options.block_length,
        layout=options.layout, target_layer_ids=tuple(options.target_layer_ids), mask_token_id=options.mask_token_id,
        transition=options.transition, rank=options.rank, execution=options.execution, candidates=options.candidates,
        confidence=options.confidence, confidence_with_law=options.confidence and options.confidence_with_law,
        copy_length=options.get("copy_length", 0), **scales)


def starting_drafter(config, model, target, data, sequences):
    """The drafter that training begins with.

    It is ``config.init_from`` where that is given, with a fresh confidence head if it has none, or one that sees something
    else, and with a fresh copy term likewise. Otherwise parameters are
    fresh, but for the backbone of ``config.init_backbone`` where that is given, whose draft vocabulary comes with it; without,
    the most frequent answer tokens can be drafted. "bigram" starts the transition tables from the bigram statistics of
    the sequences. Raises ValueError that names the config's field for a drafter that does not fit.
    """
    if config.init_from:
        if config.get("init_backbone"):
            raise ValueError("init_from, init_backbone: only one of them may be given")
        earlier = _earlier_drafter("init_from", config.init_from, target)
        free = ("block_length", "execution", "candidates", "confidence_temperatures")  # no parameter depends on them
        head = ("confidence", "confidence_with_predecessor", "confidence_with_law")
        seen = lambda config: [getattr(config, name) for name in head] + [config.confidence_with_law and config.copy_length > 0]
        fresh = ["confidence"] if model.confidence and seen(earlier.config) != seen(model) else []
        free += head if fresh else ()
        if model.copy_length and earlier.config.copy_length != model.copy_length:
            fresh.append("copying")
            free += ("copy_length",)
        if dataclasses.replace(earlier.config, **{name: getattr(model, name) for name in free}) != model:
            raise ValueError(f"init_from: {config.init_from} is another drafter ({earlier.config}) than the config asks for, "
                             f"and not only by its {', '.join(free)}")
        params = earlier.params
        if fresh:
            new = drafter_lib.init_params(model, jax.random.key(config.seed))
            params |= {name: new[name] for name in fresh}
        return dataclasses.replace(earlier, config=model, params=params)
    params = drafter_lib.init_params(model, jax.random.key(config.seed))
    if config.get("init_backbone"):
        earlier = _earlier_drafter("init_backbone", config.init_backbone, target)
        draft_ids = earlier.draft_to_target
        if earlier.config.draft_vocab_size != model.draft_vocab_size:
            raise ValueError(f"init_backbone: {config.init_backbone} drafts {earlier.config.draft_vocab_size} ids, "
                             f"drafter.draft_vocab_size is {model.draft_vocab_size}; they must be equal")
        params["backbone"] = grow(params["backbone"], earlier.params["backbone"], f"init_backbone: {config.init_backbone}")
        if earlier.config.target_layer_ids != model.target_layer_ids:
            raise ValueError(f"init_backbone: {config.init_backbone} reads layers {earlier.config.target_layer_ids}, "
                             f"drafter.target_layer_ids is {model.target_layer_ids}; they must be equal")
    else:
        draft_ids = most_frequent(data.tokens[data.loss_mask], model.vocab_size, model.draft_vocab_size)
    if config.drafter.transition_init == "bigram":
        if model.transition == "none":
            raise ValueError("drafter.transition_init: 'bigram' needs a transition that has tables; use 'normal'")
        ids = np.arange(model.vocab_size) if draft_ids is None else np.asarray(draft_ids)
        a, b = bigram.factorise(sequences, model.vocab_size, ids, model.rank)
        params["transition"] |= {"predecessor": jnp.asarray(a), "successor": jnp.asarray(b)}
    elif config.drafter.transition_init != "normal":
        raise ValueError(f"drafter.transition_init: {config.drafter.transition_init!r}; allowed: 'bigram', 'normal'")
    return drafter_lib.attach(model, params, target, draft_ids)


def _earlier_drafter(field, where, target):
    earlier = loading.load_drafter(where, target)
    if earlier.owns_tables:
        raise ValueError(f"{field}: {where} has an embedding or output table of its own; only drafters on the target's "
                         "tables can be trained")
    params = jax.tree.map(lambda array: array.astype(jnp.float32), earlier.params)  # whatever it was stored in
    return dataclasses.replace(earlier, params=params)


def grow(fresh, earlier, what):
    """The ``fresh`` parameters with those of an ``earlier`` tree in their places. Convolutions, which leave their input as
    it is when they are fresh, may be missing there; anything else that one has and the other has not is a ValueError."""
    fresh, earlier = flatten_dict(fresh, sep="/"), flatten_dict(earlier, sep="/")
    wrong = [name for name in sorted({*fresh, *earlier})
             if name not in fresh or (name in earlier and earlier[name].shape != fresh[name].shape)
             or (name not in earlier and "conv" not in name)]
    if wrong:
        raise ValueError(f"{what}: another backbone than the config asks for, see {wrong[0]}")
    return unflatten_dict(fresh | earlier, sep="/")


def most_frequent(tokens, vocab_size, count):
    """The ``count`` most frequent ids, ascending (ties to the smaller id); None where all are kept."""
    if not count or count == vocab_size:
        return None
    frequency = np.bincount(tokens, minlength=vocab_size)
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def inverse(draft_ids, vocab_size):
    """int32 [V]: draft id of each target id, -1 where it cannot be drafted."""
    if draft_ids is None:
        return jnp.arange(vocab_size, dtype=jnp.int32)
    table = np.full(vocab_size, -1, np.int32)
    table[np.asarray(draft_ids)] = np.arange(len(draft_ids))
    return jnp.asarray(table)


def _compute_features(target, documents, taps, directory, name, stop):
    with tqdm.tqdm(total=len(documents), desc="target features", unit="seq", dynamic_ncols=True) as bar:

        def progress(done, total):
            bar.update(done - bar.n)
            if stop.received:
                signals.leave(stop.received, f"the features of {done} of {total} sequences are kept in {directory}")

        return features.compute(target, documents, taps, directory, name, progress=progress)
