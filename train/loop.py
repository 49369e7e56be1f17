"""The training loop: from a config and a work directory to a trained drafter.

Everything random is a function of (seed, step), so a run that was killed goes on from its newest checkpoint and ends with
the parameters it would have had.
"""

import contextlib
import dataclasses
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
from dspark_jax import loading, sharding
from dspark_jax.backbone import Attention, BackboneConfig
from dspark_jax.checkpoints import run as run_checkpoints
from dspark_jax.data import sources
from dspark_jax.data.conversations import OnPolicyTokens
from train import batches, bigram, features, measure, programs


def train(config, workdir, target=None):
    """Train as ``config`` says (see configs/) in ``workdir`` -> the final `Drafter`.

    Writes there: config.json, drafter.json (what `load_drafter` needs), metrics.jsonl (one line a step), tensorboard/,
    checkpoints/. Raises ValueError if the directory holds a run with another config.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    mesh, writes = sharding.make_mesh(config.get("mesh", {})), jax.process_index() == 0
    if writes:
        _claim(workdir, config)
    with _whole_arrays(mesh):
        target = target or loading.load_target(config.target)
    model = drafter_config(config.drafter, target.config)  # what is wrong with the config shows before the long work
    drafter_lib.check_fit(model, target.config)
    prompts = _held_out_prompts(config.evaluation, target)
    if not 2 <= config.data.max_length <= target.config.max_position_embeddings:
        raise ValueError(f"data.max_length: {config.data.max_length}; must lie in "
                         f"[2, {target.config.max_position_embeddings}], the target's context")
    for name, value in (("checkpoint_every", config.checkpoint_every), ("batch.anchors", config.batch.anchors),
                        ("batch.anchors_per_chunk", config.batch.anchors_per_chunk),
                        ("batch.micro_steps", config.batch.micro_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value}; must be at least 1")
    if config.evaluation.blocks_every < 0:
        raise ValueError(f"evaluation.blocks_every: {config.evaluation.blocks_every}; must be at least 0")
    if config.evaluation.prompts and jax.process_count() > 1:
        raise ValueError(f"evaluation.prompts: {config.evaluation.prompts}; only 0 is allowed with several processes")
    program = programs.build(config, model, target.config, mesh)

    # ---------------------------------------------------------------- data
    token_file = config.data.tokens or sources.SHIPPED_TOKENS
    data = OnPolicyTokens.load(token_file)
    data = data if config.data.conversations is None else data.first(config.data.conversations)
    if len(data.tokens) == 0 or int(data.tokens.max()) >= target.config.vocab_size:
        raise ValueError(f"data.tokens: {token_file}: must hold ids of the target's vocabulary "
                         f"[0, {target.config.vocab_size}), and not be empty")
    sequences = [np.concatenate(data.conversation(i)) for i in range(len(data))]
    lengths = np.minimum([len(s) for s in sequences], config.data.max_length)
    weights = np.array([config.data.source_weights.get(s, 1.0) for s in data.source], np.float64)
    if not 1 <= config.batch.sequences <= np.count_nonzero(weights):
        raise ValueError(f"batch.sequences: {config.batch.sequences}; must lie in [1, {np.count_nonzero(weights)}], "
                         f"the conversations of {token_file} whose source has a weight")
    taps = tuple(config.drafter.target_layer_ids)
    rows = None
    if config.features.cached:
        directory = pathlib.Path(config.features.directory or workdir / "features")
        with sharding.first_process_first():
            cached = _compute_features(target, sequences, taps, directory)
        rows = lambda i: cached.rows[cached.starts[i]:cached.starts[i + 1]]

    # ------------------------------------------------------------- drafter
    with _whole_arrays(mesh):
        drafter = starting_drafter(config, model, target, data, sequences)
    draft_ids = drafter.draft_to_target
    if writes:
        loading.write_run_file(workdir, model, draft_ids)
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "draft_to_target": draft_ids,
              "target_head": None if draft_ids is None else target.head_rows(),
              "target_to_draft": inverse(draft_ids, target.config.vocab_size)}
    if not config.features.cached:
        frozen["target"] = target.params

    # ------------------------------------------------------------ sharding
    frozen = sharding.place(frozen, sharding.shardings(mesh, frozen), programs.compute_dtype(config))
    params = sharding.place(drafter.params, sharding.shardings(mesh, drafter.params))
    rows_here = sharding.own_rows(mesh, config.batch.sequences)
    manager = run_checkpoints.open_manager(workdir)
    start, state = run_checkpoints.restore(manager, {"params": params, "opt_state": program.start(params)})
    params, opt_state = state["params"], state["opt_state"]
    if start:
        logging.info("resuming from step %d", start)

    # ---------------------------------------------------------------- loop
    positions = config.batch.sequences * config.batch.anchors * model.block_length
    with _Metrics(workdir, start) if writes else contextlib.nullcontext() as metrics, tqdm.tqdm(
            total=config.steps, initial=start, unit="step", dynamic_ncols=True, smoothing=0.05, disable=not writes) as bar:
        for step in range(start, config.steps):
            began = time.monotonic()
            chosen = batches.choose(lengths, weights, config.batch.sequences, config.seed, step)
            batch = batches.assemble(sequences, data.prompt_len, rows, chosen[rows_here], config.data.max_length)
            batch = sharding.assemble(mesh, batch, len(chosen))
            evaluated = {}
            if config.evaluation.blocks_every and step % config.evaluation.blocks_every == 0:
                evaluated = program.evaluate(params, frozen, batch, step)  # the blocks of this step, not trained on yet
            params, opt_state, out = program.step(params, opt_state, frozen, batch, step)
            out = {name: np.asarray(value).round(6).tolist() for name, value in (evaluated | out).items()}
            out["positions_per_second"] = round(positions / (time.monotonic() - began), 1)
            if writes:
                metrics.write(step + 1, out)
            bar.set_postfix_str(f"loss {out['loss']:.3f}, accepted length {out['expected_accepted_length']:.3f}, "
                                f"{out['positions_per_second']:.0f} positions/s", refresh=False)
            bar.update()
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                run_checkpoints.save(manager, step + 1, {"params": params, "opt_state": opt_state})
    manager.wait_until_finished()
    manager.close()
    trained = drafter_lib.attach(model, sharding.whole(params), target, draft_ids)
    if prompts:
        _report_gain(config.evaluation, target, prompts, drafter, trained)
    return trained


def _whole_arrays(mesh):
    """Where arrays are made before they are spread over a mesh: in host memory where it has several devices, none of
    which needs to have room for a whole target."""
    return jax.default_device(jax.local_devices(backend="cpu")[0] if mesh.size > 1 else None)


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
    answers = np.concatenate([data.conversation(i)[1] for i in range(len(data))])
    draft_ids = most_frequent(answers, model.vocab_size, model.draft_vocab_size)
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
        changed = sorted(k for k in {*old, *new} - {"mesh"} if old.get(k) != new.get(k))  # it can go on on other devices
        if changed:
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
