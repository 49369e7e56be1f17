"""The mesh and the table; training on 1 device, on 8 and in 2 processes is the same training."""

import functools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_run
from dspark_jax import candidates, sharding
from dspark_jax import drafter as drafter_lib
from dspark_jax.checkpoints import run as run_checkpoints
from train import hlo, loop, programs

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def mesh(data, fsdp, tensor):
    return sharding.make_mesh({"data": data, "fsdp": fsdp, "tensor": tensor})


# ------------------------------------------------------------------------------------------------- the mesh and the table


@pytest.mark.parametrize("sizes, shape", [
    ({}, (8, 1, 1)), ({"tensor": 2}, (4, 1, 2)), ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
    ({"data": 1}, (1, 1, 1)), ({"data": 2, "fsdp": 2}, (2, 2, 1))])
def test_mesh(sizes, shape):
    assert tuple(sharding.make_mesh(sizes, jax.devices()[:8]).shape.values()) == shape


@pytest.mark.parametrize("sizes, message", [
    ({"model": 2}, "mesh.model: unknown axis; allowed: data, fsdp, tensor"),
    ({"fsdp": 0}, "mesh.fsdp: 0; must be at least 1"),
    ({"fsdp": -1}, "mesh: 2 axes are -1; allowed: one"),
    ({"tensor": 3}, "mesh.fsdp x mesh.tensor: 3; must divide the number of devices, 8"),
    ({"data": 4, "fsdp": 4}, "mesh: 4 x 4 x 1 = 16 devices; there are 8")])
def test_mesh_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sharding.make_mesh(sizes, jax.devices()[:8])


def test_table():
    tree = {"backbone": {"layers_0": {"self_attn": {"q_proj": {"weight": jnp.zeros((8, 4)), "bias": jnp.zeros(8)},
                                                    "q_norm": {"weight": jnp.zeros(2)}},
                                      "mlp": {"down_proj": {"weight": jnp.zeros((4, 8))}}},
                         "fc": {"weight": jnp.zeros((4, 12))}},
            "transition": {"predecessor": jnp.zeros((6, 2)), "hidden_projection": jnp.zeros((4, 2))},
            "target": {"embed_tokens": {"embedding": jnp.zeros((6, 4))}, "lm_head": {"weight": jnp.zeros((6, 4))}},
            "target_to_draft": jnp.zeros(6, jnp.int32), "draft_to_target": None}
    specs = {sharding.path_of(path): tuple(s.spec) for path, s in
             jax.tree_util.tree_leaves_with_path(sharding.shardings(mesh(2, 2, 2), {"mu": tree}))}
    assert specs == {
        "mu/backbone/layers_0/self_attn/q_proj/weight": ("tensor", "fsdp"),
        "mu/backbone/layers_0/self_attn/q_proj/bias": ("tensor",),
        "mu/backbone/layers_0/self_attn/q_norm/weight": (),
        "mu/backbone/layers_0/mlp/down_proj/weight": ("fsdp", "tensor"),
        "mu/backbone/fc/weight": ("fsdp", "tensor"),
        "mu/transition/predecessor": ("tensor", "fsdp"),
        "mu/transition/hidden_projection": (None, "fsdp"),
        "mu/target/embed_tokens/embedding": ("tensor", "fsdp"),
        "mu/target/lm_head/weight": ("tensor", "fsdp"),
        "mu/target_to_draft": ()}
    gathered = sharding.shardings(mesh(2, 2, 2), tree, gathered=True)
    assert tuple(gathered["transition"]["predecessor"].spec) == ("tensor", None)


@pytest.mark.parametrize("change, message", [
    ({"mesh": {"data": 1, "fsdp": 1, "tensor": 5}}, "mesh.tensor: 5; must divide dimension 1 of backbone/fc/weight, 64"),
    ({"mesh": {"data": 3, "fsdp": 1, "tensor": 1}}, "batch.sequences: 4; must be a multiple of batch.micro_steps x "
                                                    "mesh.data x mesh.fsdp, 1 x 3 x 1"),
    ({"compute_dtype": "float8"}, "compute_dtype: 'float8'; allowed: float32, bfloat16")])
def test_what_does_not_divide(change, message, tmp_path):
    config = tiny_run.config(tmp_path / "none.npz")
    config.update(change)
    with pytest.raises(ValueError, match=re.escape(message)):
        loop.train(config, tmp_path / "run", tiny_run.target())


# ------------------------------------------------------------------------------------------------------------- training


def recipe(tokens="none.npz", **changes):
    """Everything that is sharded: the target in the program, the candidates term, two micro-steps."""
    config = tiny_run.config(tokens)
    config.features.cached, config.drafter.draft_vocab_size = False, tiny_run.VOCABULARY
    config.drafter.transition_init = "normal"
    config.loss.update({"candidates": 0.5, "kl": 0.1, "missing_label": "inject"})
    config.batch.update({"sequences": 16, "micro_steps": 2})
    config.update(changes)
    return config


@functools.cache
def trained(sizes, steps=20, compute_dtype="float32", kind="adamw"):
    """-> (parameters, optimizer's state, metrics of the last step, the compiled text of the step) of a mesh."""
    config, target, on = recipe(compute_dtype=compute_dtype), tiny_run.target(), mesh(*sizes)
    config.optimizer.kind = kind
    model = loop.drafter_config(config.drafter, target.config)
    program = programs.build(config, model, target.config, on)
    params = drafter_lib.init_params(model, jax.random.key(0))
    drafter = drafter_lib.attach(model, params, target)
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "draft_to_target": None, "target_head": None,
              "target_to_draft": loop.inverse(None, tiny_run.VOCABULARY), "target": target.params}
    params, frozen = (sharding.place(tree, sharding.shardings(on, tree)) for tree in (params, frozen))
    state = program.start(params)
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(0, tiny_run.VOCABULARY, (16, 40)).astype(np.int32),
             "loss_mask": (rng.random((16, 40)) < 0.9).astype(np.float32)} for _ in range(steps)]
    batches = [sharding.assemble(on, batch, 16) for batch in rows]
    text = program.step.lower(params, state, frozen, batches[0], 0).compile().as_text()
    for step, batch in enumerate(batches):
        params, state, metrics = program.step(params, state, frozen, batch, step)
    evaluated = program.evaluate(params, frozen, batches[0], 0)
    return jax.device_get((params, state, metrics | evaluated)) + (text,)


def relative(a, b):
    """|a - b| / |b| over all arrays of a tree."""
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))
    return norm(jax.tree.map(lambda x, y: np.float64(x) - y, a, b)) / norm(b)


def test_muon_on_a_mesh():
    """Matrices that are spread over devices are orthogonalised as wholes."""
    one, spread = (trained(sizes, 3, kind="muon") for sizes in ((1, 1, 1), (2, 2, 2)))
    assert relative(spread[0], one[0]) < 1e-5 and relative(spread[1], one[1]) < 1e-4


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_training_on_any_mesh_is_the_same(sizes):
    """Loss, gradients (the optimizer's moments are means of them), parameters and evaluation after 20 steps."""
    expected_params, expected_state, expected, _ = trained((1, 1, 1))
    params, state, metrics, _ = trained(sizes)
    assert relative(params, expected_params) < 1e-5
    assert relative(state, expected_state) < 1e-5
    assert {"candidates", "path_accuracy", "gradient_norm"} <= set(metrics)
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_no_logits_travel():
    """Nothing as wide as a shard of the vocabulary is gathered: of the candidates, M ids and scores a shard are."""
    *_, text = trained((2, 2, 2))
    gathered, V = hlo.work(text, 8).gathers, tiny_run.VOCABULARY
    assert gathered and not [shape for shape in gathered if len(shape) > 2 and shape[-1] in (V, V // 2)], gathered


def test_bfloat16_keeps_float32_masters():
    """Forward and backward in bfloat16: near the float32 run, and parameters and moments are still float32."""
    expected_params, _, expected, _ = trained((1, 1, 1))
    params, state, metrics, text = trained((1, 1, 1), compute_dtype="bfloat16")
    assert all(leaf.dtype in (np.float32, np.int32) for leaf in jax.tree.leaves((params, state)))
    assert "bf16[" in text
    assert 1e-6 < relative(params, expected_params) < 0.1
    assert abs(metrics["loss"] / expected["loss"] - 1) < 0.05


def test_scores_of_a_sharded_choice_have_gradients():
    """of `over_mesh`, and what `scores_at` looks up: those of one device, batch and vocabulary spread over eight."""
    on, M = mesh(2, 2, 2), 3
    logits = jax.random.normal(jax.random.key(0), (4, 5, 24))
    weights = jax.random.normal(jax.random.key(1), (4, 5, M))
    laid = jax.device_put(logits, jax.NamedSharding(on, jax.P(sharding.BATCH, None, "tensor")))
    ids, _ = candidates.top_candidates(logits, M)
    plain = lambda x: jnp.sum(weights * jnp.take_along_axis(x, ids, axis=-1) ** 2)
    value, gradient = jax.value_and_grad(plain)(logits)
    for f in (lambda x: candidates.over_mesh(on, "tensor", sharding.BATCH)(x, M)[1],
              lambda x: candidates.scores_at(on, "tensor", sharding.BATCH, x, ids)):
        found = jax.jit(jax.value_and_grad(lambda x: jnp.sum(weights * f(x) ** 2)))(laid)
        np.testing.assert_allclose(found[0], value, rtol=1e-6)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ processes

PROCESS = """
import sys
from dspark_jax import sharding
sharding.join_processes()
import test_sharding, tiny_run
from train import loop
loop.train(test_sharding.recipe(sys.argv[2], steps=8), sys.argv[1], tiny_run.target())
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Two processes of four devices each: the metrics of one process of eight, and a checkpoint that it can read."""
    tiny_run.write_tokens(tmp_path / "tokens.npz")
    config = recipe(str(tmp_path / "tokens.npz"), steps=8, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    together = loop.train(config, tmp_path / "one", tiny_run.target())
    code = PROCESS.replace("steps=8", "steps=8, mesh={'data': 2, 'fsdp': 2, 'tensor': 2}")
    common = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    processes = [subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "two"), str(tmp_path / "tokens.npz")], cwd=ROOT,
        env=common | {"JAX_PROCESS_ID": str(i)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(2)]
    said = [process.communicate(timeout=1800)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[0][-2000:] + said[1][-2000:]
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
                for name in ("one", "two"))
    assert [line["step"] for line in two] == list(range(1, 9))
    for a, b in zip(one, two):
        np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)
    step, params = run_checkpoints.restore_params(tmp_path / "two", drafter_lib.abstract_params(together.config))
    assert step == 8 and relative(params, together.params) < 1e-5


@pytest.mark.parametrize("environment, message", [
    ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS: not set; allowed: all of"),
    ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "x", "JAX_PROCESS_ID": "0"}, "must be whole numbers")])
def test_processes_that_cannot_be(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        sharding.join_processes()
