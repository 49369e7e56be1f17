"""Checkpoints of a training run (Orbax): save in the background, restore the newest complete one."""

import pathlib

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers


def open_manager(workdir, keep=2):
    """A manager of workdir/checkpoints that keeps the newest ``keep`` steps."""
    options = ocp.CheckpointManagerOptions(preservation_policy=checkpoint_managers.LatestN(keep))
    return ocp.CheckpointManager(_folder(workdir), options=options)


def _folder(workdir):
    return pathlib.Path(workdir).absolute() / "checkpoints"


def save(manager, step, state):
    """Start writing ``state``, a tree of arrays, as ``step`` if there is no such step; half-written ones are never chosen."""
    if step != manager.latest_step():
        manager.save(step, args=ocp.args.StandardSave(state))


def restore(manager, state):
    """-> (step, tree like ``state``) of the newest checkpoint, or (0, ``state``) where there is none."""
    step = manager.latest_step()
    if step is None:
        return 0, state
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return step, manager.restore(step, args=ocp.args.StandardRestore(abstract))


def restore_params(workdir, abstract_params):
    """-> (step, parameters) of a run's newest checkpoint; the optimizer's state is left on disk.

    Raises ValueError naming ``workdir`` where there is no complete checkpoint.
    """
    if not _folder(workdir).is_dir():
        raise ValueError(f"{workdir}: no complete checkpoint in its 'checkpoints' folder")
    with ocp.CheckpointManager(_folder(workdir), options=ocp.CheckpointManagerOptions(create=False)) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{workdir}: no complete checkpoint in its 'checkpoints' folder")
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {"params": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params)}
        args = ocp.args.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True)
        return step, manager.restore(step, args=args)["params"]
