"""Part `train` of `train.benchmark`: one optimiser step of `train.main`, beside the same step in plain PyTorch.

The step is that of `train.objective`: DSpark's default head, the confidence head, the loss, the gradients, clipping and
AdamW, on random target features of one sequence. PyTorch (`train.benchmark_torch`) runs in a process of its own, takes its steps by turns with
JAX and starts from the same parameters and batch; it does not draw the anchors and keeps no metrics. Before anything is
timed the losses of the first steps must agree.

B sequences, S positions, N anchors per sequence, T draft positions, V vocabulary, D model width.
"""

import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from configs import smollm2
from dspark_jax import anchors as anchors_lib
from dspark_jax import drafter as drafter_lib
from train import measure, objective, timing

COMPARED = 3  # steps whose losses must agree between JAX and PyTorch
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}  # relative; sums run in another order


def run(target, drafter, *, drafts, anchors, repeats, budget, dtype="float32", torch_python=None) -> dict:
    """Times steps of a fresh drafter with ``drafter``'s backbone and rank, T = ``drafts``, DSpark's default head and the
    target's whole vocabulary.

    anchors: N, of one sequence. repeats, budget: of `timing.alternate`. dtype: what both compute in, "float32" or
    "bfloat16", of parameters in float32. torch_python: an interpreter that has torch; None leaves PyTorch out. Returns
    plain values.
    """
    recipe, vocab = smollm2.get_config(), target.config.vocab_size
    recipe.optimizer.warmup_steps, recipe.optimizer.decay_steps = 0, 10**9  # a constant rate
    # The heads that PyTorch's step has; sequential, as its accept rates are those of drafts drawn from all tokens.
    model = dataclasses.replace(
        drafter.config, block_length=drafts, draft_vocab_size=vocab, transition="vanilla", execution="sequential",
        confidence=True, confidence_with_predecessor=True, confidence_with_law=False, confidence_temperatures=(), copy_length=0)
    optimizer = objective.make_optimizer(recipe.optimizer, recipe.optimizer.decay_steps)
    params = drafter_lib.init_params(model, jax.random.key(0))
    tables = {"embedding": target.embedding(), "head_rows": target.head_rows()}
    frozen = {name: table.astype(dtype) for name, table in tables.items()} | {
        "target_to_draft": jnp.arange(vocab), "draft_to_target": None, "target_head": None}
    batch, key = _batch(model, anchors), jax.random.key(3)
    result = {"dtype": dtype, "drafts": drafts, "anchors": anchors, "sequence_length": batch["tokens"].shape[1],
              "vocabulary": vocab, "parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
    stored = traverse_util.flatten_dict(jax.device_get(params), sep="/")  # the step will donate its own

    weights = objective.loss_weights(recipe.loss)
    step = objective.make_step(model, weights, optimizer, anchors=anchors, dtype=jnp.dtype(dtype))
    step = jax.jit(step, donate_argnums=(0, 1))
    state, number = (params, optimizer.init(params)), jnp.int32(0)
    step = step.lower(*state, frozen, batch, key, number).compile()
    result["temporary_bytes"] = step.memory_analysis().temp_size_in_bytes

    def jax_step():
        nonlocal state
        *state, metrics = step(*state, frozen, batch, key, number)
        return metrics["loss"]

    with contextlib.ExitStack() as stack:
        calls = {"jax": jax_step}
        if torch_python and (reason := not_in_torch(model)):
            result["torch"] = {"left_out": reason}
        elif torch_python:
            inputs = _torch_batch(model, tables, batch, anchors, key)
            about, calls["torch"] = stack.enter_context(_torch_process(
                torch_python, stored, inputs, _settings(model, recipe) | {"dtype": dtype}))
            losses = {name: [float(call()) for _ in range(COMPARED)] for name, call in calls.items()}
            if not np.allclose(losses["jax"], losses["torch"], rtol=TOLERANCE[dtype]):
                raise RuntimeError(f"JAX and PyTorch compute different losses, {losses}: there is nothing to compare")
            result["torch"] = {**about, "losses": losses}
        times = timing.alternate(calls, repeats, budget, description="train")
    result["seconds"] = times
    result["positions_per_second"] = {name: anchors * drafts / t["median"] for name, t in times.items()}
    if "torch" in times:
        result["torch_over_jax"] = times["torch"]["median"] / times["jax"]["median"]
    return result


def torch_interpreter(python):
    """``python``, or this interpreter where that is None and torch is installed, or None: no PyTorch.

    Raises ValueError or OSError for an interpreter that cannot import torch.
    """
    if python is None:
        return sys.executable if importlib.util.find_spec("torch") else None
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        raise ValueError(f"--torch_python: {python} cannot import torch; allowed: an interpreter that can")
    return python


def _batch(model, anchors):
    """One sequence, whose first 32 tokens are the prompt, with random tokens and features."""
    prompt, length = 32, max(256, 128 * -(-(anchors + 64) // 128))
    width = (len(model.target_layer_ids) + 1) * model.backbone.hidden_size
    return {"tokens": jax.random.randint(jax.random.key(1), (1, length), 0, model.vocab_size),
            "loss_mask": (jnp.arange(length) >= prompt).astype(jnp.float32)[None],
            "features": jax.random.normal(jax.random.key(2), (1, length, width), jnp.bfloat16)}


def not_in_torch(model):
    """Why the PyTorch step cannot be compared, or None. It is written for plain layers."""
    plain = dataclasses.replace(
        model, output_multiplier=1.0, final_logit_softcapping=0.0, input_embedding_scale=1.0, backbone=dataclasses.replace(
            model.backbone, attention_bias=False, conv_kernel_size=0, rope_scaling=None, attention=()))
    return None if plain == model else "it has no such scale, convolution or attention"


def _torch_batch(model, tables, batch, anchors, key):
    """What `objective.sample_blocks` and the drafter derive from the batch before it computes anything, as numpy arrays."""
    T, tokens = model.block_length, batch["tokens"]
    length, width = tokens.shape[1], model.backbone.hidden_size
    anchors, keep = anchors_lib.sample_anchors(key, batch["loss_mask"], anchors)
    features = batch["features"].astype(jnp.float32)
    return jax.device_get({
        **tables, "features": features[..., :-width],
        "final": anchors_lib.gather(features[..., -width:], anchors_lib.target_indices(anchors, keep, T, length)),
        "ids": anchors_lib.block_tokens(tokens, anchors, keep, model.slots, model.mask_token_id),
        "positions": anchors_lib.block_positions(anchors, model.slots),
        "context_positions": jnp.arange(length)[None],
        "visible": anchors_lib.block_visibility(anchors, keep, length, model.slots),
        "labels": anchors_lib.labels(tokens, anchors, keep, T),
        "predecessors": anchors_lib.predecessors(tokens, anchors, keep, T),
        "mask": anchors_lib.evaluation_mask(batch["loss_mask"], anchors, keep, T).astype(jnp.float32),
    })


def _settings(model, recipe):
    b, o = model.backbone, recipe.optimizer
    return {"drafts": model.block_length, "layers": b.num_hidden_layers, "head_dim": b.head_dim,
            "epsilon": b.rms_norm_eps, "rope_theta": b.rope_theta, **recipe.loss.to_dict(),
            "lr": o.lr, "b1": o.b1, "b2": o.b2, "weight_decay": o.weight_decay, "clip": o.clip}


@contextlib.contextmanager
def _torch_process(python, params, batch, settings):
    """-> (what it says of itself, function that takes a step and returns the loss before it)."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "step.npz")
        np.savez(file, settings=json.dumps(settings), **{f"params/{name}": p for name, p in params.items()},
                 **{f"batch/{name}": x for name, x in batch.items()})
        with subprocess.Popen([python, "-m", "train.benchmark_torch", str(file)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[1]) as process:

            def line():
                if not (text := process.stdout.readline()):
                    raise RuntimeError("the PyTorch process ended; its own message stands above")
                return text

            def step():
                process.stdin.write("\n")
                process.stdin.flush()
                return float(line())

            yield json.loads(line()), step


def report(result) -> str:
    """The table that is printed, and what it compares."""
    header = ["training step", "ms", "positions/s"]
    table = measure.table(header, [[name, timing.cell(t, digits=1), f"{result['positions_per_second'][name]:.0f}"]
                                   for name, t in result["seconds"].items()])
    text = (f"{result['anchors']} anchors of one sequence of {result['sequence_length']} positions, {result['drafts']} "
            f"drafts, vocabulary {result['vocabulary']}, {result['parameters'] / 1e6:.1f} million parameters, computed in "
            f"{result['dtype']}; "
            f"JAX's temporary memory {result['temporary_bytes'] / 1e6:.0f} MB")
    torch = result.get("torch", {"left_out": "no interpreter that has it (--torch_python)"})
    if "left_out" in torch:
        return f"{table}\n{text}\nPyTorch left out: {torch['left_out']}"
    losses = "; ".join(f"{name} " + ", ".join(f"{x:.4f}" for x in torch["losses"][name]) for name in torch["losses"])
    return (f"{table}\n{text}\nPyTorch / JAX: {result['torch_over_jax']:.2f} times the time. PyTorch {torch['torch']}, "
            f"eager, {torch['threads']} threads, scaled_dot_product_attention, fused AdamW;\nfrom the same "
            f"parameters, on the same batch; losses of the first steps: {losses}")
