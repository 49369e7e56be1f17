"""A run directory belongs to one config: training on with another one would silently mix two runs."""

import json

import jax

from dspark_jax.whole_files import replacing

# What does not change what is trained, but how it is watched, kept and spread over devices.
FREE = ("batch.anchors_per_chunk", "batch.micro_steps", "checkpoint_every", "checkpoint_keep", "checkpoint_keep_every",
        "evaluation", "features.directory", "log_every", "mesh", "profile")
ABSENT = "not set"


def claim(workdir, config) -> None:
    """Write ``config`` to workdir/config.json. Raises ValueError, and leaves everything as it is, if checkpoints of a run
    with another config are there; fields in `FREE` may differ."""
    file, text = workdir / "config.json", config.to_json(indent=2, sort_keys=True)
    if file.exists() and (workdir / "checkpoints").exists():  # without, a mistake in the first config can be put right
        try:
            changed = differences(json.loads(file.read_bytes()), json.loads(text))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file}: not JSON of a config ({error}); choose another --workdir or delete this one"
                             ) from error
        fixed = [f"{name}: {old} there, {new} now" for name, (old, new) in changed.items() if not _is_free(name)]
        if fixed:
            raise ValueError(f"{file}: this run was started with another config ({'; '.join(fixed)}); "
                             "choose another --workdir or give the same config")
    if jax.process_index() == 0:
        with replacing(file, "w") as whole:
            whole.write(text)


def differences(old, new) -> dict:
    """{dotted name: (value in old, value in new)} of the fields of two nested dicts that differ, as JSON texts."""
    old, new = _flat(old), _flat(new)
    return {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in sorted({*old, *new})
            if old.get(name, ABSENT) != new.get(name, ABSENT)}


def _flat(tree, prefix=""):
    fields = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            fields |= _flat(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = json.dumps(value)
    return fields


def _is_free(name):
    return any(name == free or name.startswith(f"{free}.") for free in FREE)
