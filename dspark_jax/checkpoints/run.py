"""Checkpoints of a training run (Orbax): save in the background, restore the newest complete one, onto any mesh."""

import json
import pathlib

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers


def open_manager(workdir, keep=2, keep_every=None):
    """A manager of workdir/checkpoints that keeps the newest ``keep`` steps and all multiples of ``keep_every``.

    What saves that were killed have left is deleted, so only the run itself may open one.
    """
    policy = checkpoint_managers.LatestN(keep)
    if keep_every is not None:
        policy = checkpoint_managers.AnyPreservationPolicy([policy, checkpoint_managers.EveryNSteps(keep_every)])
    options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
    manager = ocp.CheckpointManager(_folder(workdir), options=options)
    for step in set(manager.all_steps()) - set(_complete_steps(manager)):
        manager.delete(step)  # it would stand in the way of the same step, and count as one that is kept
    return manager


def _folder(workdir):
    return pathlib.Path(workdir).absolute() / "checkpoints"


def _complete_steps(manager):
    """Ascending. Orbax gives a directory its name last, but a copy or a deletion of it can still have been cut off."""
    return [step for step in sorted(manager.all_steps()) if _is_committed(pathlib.Path(manager.directory, str(step)))]


def _is_committed(directory):
    try:
        return bool(json.loads((directory / "_CHECKPOINT_METADATA").read_bytes())["commit_timestamp_nsecs"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def save(manager, step, state):
    """Start writing ``state``, a tree of arrays, as ``step`` if there is no such step.

    The arrays may be donated as soon as this returns. With several processes all of them call it.
    """
    if step != manager.latest_step():
        manager.save(step, args=ocp.args.StandardSave(state))


def restore(manager, state):
    """-> (step, tree like ``state``) of the newest complete checkpoint, or (0, ``state``) where there is none.

    state: arrays, or `jax.ShapeDtypeStruct` with shardings. The result is sharded as they are, whatever mesh and number
    of devices the checkpoint was written from. Raises ValueError naming a checkpoint that cannot be read.
    """
    steps = _complete_steps(manager)
    if not steps:
        return 0, state
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return steps[-1], _read(manager, steps[-1], ocp.args.StandardRestore(abstract))


def steps_of(workdir):
    """The steps of a run's complete checkpoints, ascending; empty where there are none."""
    if not _folder(workdir).is_dir():
        return []
    with ocp.CheckpointManager(_folder(workdir), options=ocp.CheckpointManagerOptions(create=False)) as manager:
        return list(_complete_steps(manager))


def restore_params(workdir, abstract_params, step=None):
    """-> (step, parameters) of a run's complete checkpoint of ``step``, None: the newest; the optimizer's state is left on
    disk.

    Raises ValueError naming ``workdir`` where there is none, or the checkpoint that cannot be read.
    """
    steps = steps_of(workdir)
    if not steps:
        raise ValueError(f"{workdir}: no complete checkpoint in its 'checkpoints' folder")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"{workdir}: no complete checkpoint of step {step}; allowed: {', '.join(map(str, steps))}")
    with ocp.CheckpointManager(_folder(workdir), options=ocp.CheckpointManagerOptions(create=False)) as manager:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {"params": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params)}
        args = ocp.args.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True)
        return step, _read(manager, step, args)["params"]


def _read(manager, step, args):
    try:
        return manager.restore(step, args=args)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{pathlib.Path(manager.directory, str(step))}: this checkpoint cannot be read ({reason}); "
                         "with its directory moved away, the one before it is used") from error
