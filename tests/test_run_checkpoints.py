"""Checkpoints of a run: which are kept, which are never chosen, and that they do not belong to a mesh."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pairs
import tiny_run
from dspark_jax import sharding
from dspark_jax.checkpoints import run as run_checkpoints
from train import objective

QUICK = {"xla_backend_optimization_level": 0}  # three programs are compiled here, for a few steps each
STATE = {"params": {"a": np.arange(600.0, dtype=np.float32).reshape(20, 30)}, "count": np.int32(7)}


def state(step):
    return jax.tree.map(lambda array: jnp.asarray(array + step, array.dtype), STATE)


def write(workdir, steps, **policy):
    with run_checkpoints.open_manager(workdir, **policy) as manager:
        for step in steps:
            run_checkpoints.save(manager, step, state(step))
    return pathlib.Path(workdir, "checkpoints")


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def check_restores(workdir, step):
    with run_checkpoints.open_manager(workdir) as manager:
        found, restored = run_checkpoints.restore(manager, state(0))
    assert found == step
    jax.tree.map(np.testing.assert_array_equal, restored, state(step))
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), STATE["params"])
    found, params = run_checkpoints.restore_params(workdir, abstract)
    assert found == step
    np.testing.assert_array_equal(params["a"], state(step)["params"]["a"])


@pytest.mark.parametrize("policy, kept", [
    ({}, [7, 8]), ({"keep": 1}, [8]), ({"keep": 3}, [6, 7, 8]), ({"keep": 1, "keep_every": 3}, [3, 6, 8])])
def test_keep_policy(tmp_path, policy, kept):
    assert names(write(tmp_path, range(1, 9), **policy)) == list(map(str, kept))


def test_an_older_checkpoint_can_be_asked_for(tmp_path):
    write(tmp_path, range(1, 5), keep=1, keep_every=2)
    assert run_checkpoints.steps_of(tmp_path) == [2, 4] and run_checkpoints.steps_of(tmp_path / "none") == []
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), STATE["params"])
    found, params = run_checkpoints.restore_params(tmp_path, abstract, 2)
    assert found == 2
    np.testing.assert_array_equal(params["a"], state(2)["params"]["a"])
    with pytest.raises(ValueError, match="no complete checkpoint of step 3; allowed: 2, 4"):
        run_checkpoints.restore_params(tmp_path, abstract, 3)


def cut_off_copy(folder):
    """A newer checkpoint of which only the arrays came along."""
    shutil.copytree(folder / "4", folder / "9")
    (folder / "9" / "_CHECKPOINT_METADATA").unlink()


def cut_off_metadata(folder):
    shutil.copytree(folder / "4", folder / "9")
    (folder / "9" / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1')


def not_committed(folder):
    shutil.copytree(folder / "4", folder / "9")
    (folder / "9" / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}')


def empty_directory(folder):
    (folder / "9").mkdir()


def killed_save(folder):
    """What Orbax leaves behind: everything written, but the directory has its temporary name."""
    shutil.copytree(folder / "4", folder / "9.orbax-checkpoint-tmp")
    (folder / "9.orbax-checkpoint-tmp" / "default").rename(
        folder / "9.orbax-checkpoint-tmp" / "default.orbax-checkpoint-tmp")


@pytest.mark.parametrize("break_off", [cut_off_copy, cut_off_metadata, not_committed, empty_directory, killed_save])
def test_half_written_checkpoint_is_never_chosen(tmp_path, break_off):
    folder = write(tmp_path, [3, 4])
    break_off(folder)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), STATE["params"])
    assert run_checkpoints.restore_params(tmp_path, abstract)[0] == 4  # who only reads leaves it alone
    assert len(names(folder)) == 3
    check_restores(tmp_path, 4)
    assert names(folder) == ["3", "4"]
    write(tmp_path, [9])  # and it is not in the way
    check_restores(tmp_path, 9)


def test_half_written_checkpoint_alone(tmp_path):
    folder = write(tmp_path, [4])
    cut_off_copy(folder)
    shutil.rmtree(folder / "4")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run_checkpoints.restore_params(tmp_path, {})
    with run_checkpoints.open_manager(tmp_path) as manager:
        assert run_checkpoints.restore(manager, STATE) == (0, STATE)


@pytest.mark.parametrize("pattern", ["default/d/*", "default/manifest.ocdbt"])
@pytest.mark.parametrize("missing", [True, False])
def test_damaged_checkpoint(tmp_path, pattern, missing):
    """Arrays that are gone or cut off are an error that names the checkpoint, never zeros; the one before is still there."""
    folder = write(tmp_path, [3, 4])
    for file in [*(folder / "4").glob(pattern), *(folder / "4").glob(pattern.replace("default", "default/ocdbt*"))]:
        file.unlink() if missing else file.write_bytes(file.read_bytes()[:len(file.read_bytes()) // 2])
    with run_checkpoints.open_manager(tmp_path) as manager, pytest.raises(ValueError) as error:
        run_checkpoints.restore(manager, state(0))
    assert str(error.value).startswith(f"{folder / '4'}: this checkpoint cannot be read") and "\n" not in str(error.value)
    shutil.rmtree(folder / "4")
    check_restores(tmp_path, 3)


# ------------------------------------------------------------------------------------------------------- another mesh


class Training:
    """Steps of one tiny drafter over ``count`` of the devices: parameters and sequences are split among them."""

    def __init__(self, count):
        self.mesh = sharding.make_mesh({"data": count}, jax.devices()[:count])
        config = tiny_run.config("")
        self.drafter = drafter = pairs.random_drafter(tiny_run.target(), block_length=3, layers=1)
        self.width = (len(drafter.config.target_layer_ids) + 1) * drafter.config.backbone.hidden_size
        self.optimizer = objective.make_optimizer(config.optimizer, config.steps)
        frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "target_head": None,
                  "draft_to_target": None, "target_to_draft": jnp.arange(tiny_run.VOCABULARY)}
        self.frozen = self.place(frozen, lambda shape: ())
        self.step = jax.jit(objective.make_step(
            drafter.config, objective.loss_weights(config.loss), self.optimizer, anchors=4, mesh=self.mesh),
            compiler_options=QUICK)

    def place(self, tree, axes):
        return jax.tree.map(
            lambda a: jax.device_put(a, NamedSharding(self.mesh, PartitionSpec(*axes(np.shape(a))))), tree)

    def start(self):
        params = self.drafter.params
        split = lambda shape: next(
            ((None,) * i + ("data",) for i, n in enumerate(shape) if n % self.mesh.size == 0), ())
        return self.place({"params": params, "opt_state": self.optimizer.init(params)}, split)

    def run(self, state, steps):
        """-> (state, [losses])."""
        losses = []
        for number in steps:
            rng = np.random.default_rng([5, number])
            batch = {"tokens": rng.integers(0, tiny_run.VOCABULARY, (8, 16)), "loss_mask": np.ones((8, 16), np.float32),
                     "features": rng.standard_normal((8, 16, self.width)).astype(np.float32)}
            batch = self.place(batch, lambda shape: ("data",))
            params, opt_state, out = self.step(
                state["params"], state["opt_state"], self.frozen, batch, jax.random.key(number), number)
            state = {"params": params, "opt_state": opt_state}
            losses.append(float(out["loss"]))
        return state, losses


def test_restored_onto_another_number_of_devices(tmp_path):
    """Saved from eight devices; on four and on one the same numbers, in their own sharding, and the same losses."""
    eight = Training(8)
    state, _ = eight.run(eight.start(), range(3))
    with run_checkpoints.open_manager(tmp_path) as manager:
        run_checkpoints.save(manager, 3, state)
    _, expected = eight.run(state, range(3, 6))
    for count in (4, 1):
        training = Training(count)
        wanted = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), training.start())
        with run_checkpoints.open_manager(tmp_path) as manager:
            step, restored = run_checkpoints.restore(manager, wanted)
        assert step == 3
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        jax.tree.map(lambda a, b: a.sharding == b.sharding or pytest.fail(f"{a.sharding}"), restored, wanted)
        assert any(len(a.sharding.device_set) == count and not a.is_fully_replicated
                   for a in jax.tree.leaves(restored)) == (count > 1)
        _, losses = training.run(restored, range(3, 6))
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
