"""The training loop: from a config and a work directory to a trained drafter.

Everything random is a function of (seed, step), so a run that was killed goes on from its newest checkpoint and ends with
the parameters it would have had.
"""

import dataclasses
import functools
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX
import tqdm
from absl import logging

from dspark_jax import drafter as drafter_lib
from dspark_jax import loading
from dspark_jax.backbone import Attention, BackboneConfig
from dspark_jax.checkpoints import run as run_checkpoints
from dspark_jax.data import chat, sources
from dspark_jax.data.documents import Documents
from train import batches, bigram, block_evaluation, features, measure, objective


def train(config, workdir, target=None):
    """Train as ``config`` says (see configs/) in ``workdir`` -> the final `Drafter`.

    Writes there: config.json, drafter.json (what `load_drafter` needs), metrics.jsonl (one line a step), tensorboard/,
    checkpoints/. Raises ValueError if the directory holds a run with another config.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    _claim(workdir, config)
    target = target or loading.load_target(config.target)
    model = drafter_config(config.drafter, target.config)  # what is wrong with the config shows before the long work
    drafter_lib.check_fit(model, target.config)
    trained = tuple(config.drafter.get("trained", objective.PARTS))
    if not trained or not set(trained) <= set(objective.PARTS):
        raise ValueError(f"drafter.trained: {trained}; allowed: some of {', '.join(objective.PARTS)}")
    optimizer = objective.make_optimizer(config.optimizer, config.steps, trained)
    prompts = _held_out_prompts(config.evaluation, target)
    if not 2 <= config.data.max_length <= target.config.max_position_embeddings:
        raise ValueError(f"data.max_length: {config.data.max_length}; must lie in "
                         f"[2, {target.config.max_position_embeddings}], the target's context")
    row_length = config.data.get("row_length")
    if row_length is not None and row_length < config.data.max_length:
        raise ValueError(f"data.row_length: {row_length}; must be at least data.max_length, {config.data.max_length}")
    loss = objective.loss_weights(config.loss)
    for name, value in (("checkpoint_every", config.checkpoint_every), ("batch.anchors", config.batch.anchors),
                        ("batch.anchors_per_chunk", config.batch.anchors_per_chunk),
                        ("batch.micro_steps", config.batch.micro_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value}; must be at least 1")
    if config.evaluation.blocks_every < 0:
        raise ValueError(f"evaluation.blocks_every: {config.evaluation.blocks_every}; must be at least 0")
    if config.batch.sequences % config.batch.micro_steps:
        raise ValueError(f"batch.micro_steps: {config.batch.micro_steps}; must divide batch.sequences, "
                         f"{config.batch.sequences}")

    # ---------------------------------------------------------------- data
    token_file = config.data.tokens or sources.SHIPPED_TOKENS
    data = _read_documents(token_file, config.data, target)
    sequences = [data.document(i)[0] for i in range(len(data))]
    lengths = np.minimum(data.length.astype(np.int64), config.data.max_length)
    weights = np.array([config.data.source_weights.get(s, 1.0) for s in data.source], np.float64)
    if not 1 <= config.batch.sequences <= np.count_nonzero(weights):
        raise ValueError(f"batch.sequences: {config.batch.sequences}; must lie in [1, {np.count_nonzero(weights)}], "
                         f"the conversations of {token_file} whose source has a weight")
    choose = functools.partial(batches.choose_packed, length=row_length) if row_length else batches.choose
    taps = tuple(config.drafter.target_layer_ids)
    rows = None
    if config.features.cached:
        directory = pathlib.Path(config.features.directory or workdir / "features")
        cached = _compute_features(target, sequences, taps, directory)
        rows = lambda i: cached.rows[cached.starts[i]:cached.starts[i + 1]]

    # ------------------------------------------------------------- drafter
    drafter = starting_drafter(config, model, target, data, sequences)
    params, draft_ids = drafter.params, drafter.draft_to_target
    loading.write_run_file(workdir, model, draft_ids)
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "draft_to_target": draft_ids,
              "target_head": None if draft_ids is None else target.head_rows(),
              "target_to_draft": inverse(draft_ids, target.config.vocab_size)}
    online = None
    if not config.features.cached:
        online, frozen["target"] = (target.config, taps), target.params

    # -------------------------------------------------------------- update
    step_fn = jax.jit(objective.make_step(
        model, loss, optimizer, anchors=config.batch.anchors, anchors_per_chunk=config.batch.anchors_per_chunk,
        micro_steps=config.batch.micro_steps, online=online, trained=trained), donate_argnums=(0, 1))
    evaluate = jax.jit(block_evaluation.make_evaluation(
        model, anchors=config.batch.anchors, anchors_per_chunk=config.batch.anchors_per_chunk, online=online))
    manager = run_checkpoints.open_manager(workdir)
    fresh = jax.tree.map(jnp.copy, params)  # the step donates what it is given; the evaluation wants the start again
    start, state = run_checkpoints.restore(manager, {"params": fresh, "opt_state": optimizer.init(params)})
    params, opt_state = state["params"], state["opt_state"]
    if start:
        logging.info("resuming from step %d", start)
    key = jax.random.key(config.seed)

    # ---------------------------------------------------------------- loop
    positions = config.batch.sequences * config.batch.anchors * model.block_length
    with _Metrics(workdir, start) as metrics, tqdm.tqdm(
            total=config.steps, initial=start, unit="step", dynamic_ncols=True, smoothing=0.05) as bar:
        for step in range(start, config.steps):
            began = time.monotonic()
            chosen = choose(lengths, weights, config.batch.sequences, seed=config.seed, step=step)
            batch = batches.assemble(data, rows, chosen, row_length or config.data.max_length, config.data.max_length)
            batch = {name: jnp.asarray(array) for name, array in batch.items() if array is not None}
            step_key, evaluated = jax.random.fold_in(key, step), {}
            if config.evaluation.blocks_every and step % config.evaluation.blocks_every == 0:
                evaluated = evaluate(params, frozen, batch, step_key)  # the blocks of this step, not trained on yet
            params, opt_state, out = step_fn(params, opt_state, frozen, batch, step_key, step)
            out = {name: np.asarray(value).round(6).tolist() for name, value in (evaluated | out).items()}
            out["positions_per_second"] = round(positions / (time.monotonic() - began), 1)
            metrics.write(step + 1, out)
            bar.set_postfix_str(f"loss {out['loss']:.3f}, accepted length {out['expected_accepted_length']:.3f}, "
                                f"{out['positions_per_second']:.0f} positions/s", refresh=False)
            bar.update()
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                run_checkpoints.save(manager, step + 1, {"params": params, "opt_state": opt_state})
    manager.wait_until_finished()
    manager.close()
    trained = drafter_lib.attach(model, params, target, draft_ids)
    if prompts:
        _report_gain(config.evaluation, target, prompts, drafter, trained)
    return trained


def _read_documents(file, options, target):
    """The `Documents` of a training config's ``data`` section, from chat data (.jsonl) or from a token file (.npz)."""
    vocab_size, count = target.config.vocab_size, options.conversations
    if str(file).endswith(".jsonl"):
        data, report = chat.read_documents(
            file, target.tokenizer, vocab_size, options.max_length, count,
            progress=functools.partial(tqdm.tqdm, desc="chat data", unit="row", dynamic_ncols=True))
        print(report)
        return data
    data = Documents.load(file)
    data = data if count is None else data.first(count)
    if len(data) == 0 or int(data.tokens.max()) >= vocab_size:
        raise ValueError(f"data.tokens: {file}: must hold ids of the target's vocabulary [0, {vocab_size}), and not be "
                         "empty")
    return data


def _held_out_prompts(options, target):
    """``options.prompts`` token lists of each evaluation set."""
    if options.prompts and target.tokenizer is None:
        raise ValueError("evaluation.prompts: this target has no tokenizer; only 0 is allowed")
    return [target.tokenizer.chat(prompt.messages) for name in sources.EVALUATION_SOURCES
            for prompt in (sources.evaluation_prompts(name, options.prompts) if options.prompts else ())]


def _report_gain(options, target, prompts, before, after):
    """Print the accepted length of both drafters on held-out prompts, greedily decoded."""
    lengths = [measure.evaluate(target, drafter, prompts, max_new_tokens=options.max_new_tokens, plain=False,
                                description=what).accepted_length
               for what, drafter in (("before training", before), ("after training", after))]
    print(f"accepted length on {len(prompts)} held-out prompts: {lengths[0]:.3f} before training, {lengths[1]:.3f} after")


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
        confidence=options.confidence, **scales)


def starting_drafter(config, model, target, data, sequences):
    """The drafter ``config.init_from`` where there is one. Otherwise fresh parameters and the most frequent answer tokens
    as draft vocabulary, with "bigram" starting the transition tables from the bigram statistics of the sequences."""
    if config.init_from:
        earlier = loading.load_drafter(config.init_from, target)
        if earlier.config != model:
            raise ValueError(f"init_from: {config.init_from} is another drafter ({earlier.config}) than the config asks for")
        if earlier.owns_tables:
            raise ValueError(f"init_from: {config.init_from} has an embedding or output table of its own; only "
                              "drafters on the target's tables can be trained")
        params = jax.tree.map(lambda array: array.astype(jnp.float32), earlier.params)  # whatever it was stored in
        return dataclasses.replace(earlier, params=params)
    draft_ids = most_frequent(data.tokens[data.loss_mask], model.vocab_size, model.draft_vocab_size)
    params = drafter_lib.init_params(model, jax.random.key(config.seed))
    if config.drafter.transition_init == "bigram":
        if model.transition == "none":
            raise ValueError("drafter.transition_init: 'bigram' needs a transition that has tables; use 'normal'")
        ids = np.arange(model.vocab_size) if draft_ids is None else draft_ids
        a, b = bigram.factorise(sequences, model.vocab_size, ids, model.rank)
        params["transition"] |= {"predecessor": jnp.asarray(a), "successor": jnp.asarray(b)}
    elif config.drafter.transition_init != "normal":
        raise ValueError(f"drafter.transition_init: {config.drafter.transition_init!r}; allowed: 'bigram', 'normal'")
    return drafter_lib.attach(model, params, target, draft_ids)


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


def _compute_features(target, sequences, taps, directory):
    with tqdm.tqdm(total=len(sequences), desc="target features", unit="seq", dynamic_ncols=True) as bar:
        return features.compute(target, sequences, taps, directory,
                                progress=lambda done, _: bar.update(done - bar.n))


def _claim(workdir, config):
    """A directory belongs to one config: training on with another one would silently mix two runs."""
    file, text = workdir / "config.json", config.to_json(indent=2, sort_keys=True)
    if file.exists() and (workdir / "checkpoints").exists():  # without, a mistake in the first config can be put right
        try:
            old, new = json.loads(file.read_bytes()), json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error}); choose another --workdir or delete this one") from error
        if old != new:
            changed = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
            raise ValueError(f"{file}: this run was started with another config ({', '.join(changed)} differ); "
                             "choose another --workdir or give the same config")
        return
    scratch = file.with_suffix(".tmp")
    scratch.write_text(text)
    os.replace(scratch, file)  # a run that is killed right here must not leave half a file


class _Metrics:
    """metrics.jsonl, one JSON line a step, and TensorBoard. Lines of steps that are run again are dropped first."""

    def __init__(self, workdir, start):
        self.path = workdir / "metrics.jsonl"
        kept = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= start:
                        kept.append(line)
                except (json.JSONDecodeError, KeyError):
                    pass  # the last line of a killed run can be cut off
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text("".join(line + "\n" for line in kept))
        os.replace(scratch, self.path)
        self.board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)

    def __enter__(self):
        self.file = open(self.path, "a")
        return self

    def __exit__(self, *_):
        self.file.close()
        self.board.close()

    def write(self, step, values):
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            for i, v in enumerate(value if isinstance(value, list) else [value]):
                self.board.add_scalar(f"train/{name}@{i}" if isinstance(value, list) else f"train/{name}", v, step)
