"""Drafters as Hugging Face directories: config.json and safetensors, in the "native" layout or a published one.

The published layouts are a table, `dspark_jax.checkpoints.layouts`. The "native" layout keeps the published tensor
names of the backbone and heads, weights as [out, in], and every field of `DrafterConfig` in config.json, so that
nothing has to be derived; embedding and output head are the target's and are not stored.

Loading is strict: a drafter with a tensor too many, too few, or of another shape or dtype would decode, and accept
almost nothing.
"""

import dataclasses
import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dspark_jax import layers
from dspark_jax.backbone import Attention, BackboneConfig
from dspark_jax.checkpoints import layouts, safetensors_files, tensors
from dspark_jax.checkpoints.fields import Fields
from dspark_jax.checkpoints.tensors import Entry
from dspark_jax.drafter import Drafter, DrafterConfig, abstract_params, attach, check_fit
from dspark_jax.whole_files import replacing

ARCHITECTURE = "DSparkJaxDrafter"
NATIVE = "native"
LAYOUTS = (NATIVE, *layouts.LAYOUTS)

_HEADS = layouts.MARKOV_NAMES | layouts.CONFIDENCE_NAMES | {  # our path -> (native name, stored transposed)
    "transition/hidden_projection": ("markov_head.hidden_projection.weight", True),
    "copying/weight": ("copy_head.weight", False), "copying/kernel": ("copy_head.kernel", False)}
_OFFSETS, _MEMBERS = "d2t", "t2d"  # target id = draft id + offset; bool [V], whether a target id can be drafted
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_VERIFIERS = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's; speculators may leave them in


def published_name(path):
    """('backbone', 'layers_0', 'mlp', 'up_proj', 'weight') -> ('layers.0.mlp.up_proj.weight', stored transposed)."""
    head = _HEADS.get("/".join(path))
    if head:
        return head
    parts = [p.replace("layers_", "layers.") for p in path[1:]]
    if parts[-1] == "kernel_projection":
        return ".".join([*parts, "weight"]), True
    return ".".join(parts), False


@functools.lru_cache(maxsize=16)
def _entries(config, layout):
    """How every parameter of a drafter is stored: {path: (Entry, our shape)}."""
    entries = {}
    for path, leaf in traverse_util.flatten_dict(abstract_params(config)).items():
        name, transposed = published_name(path)
        shape = leaf.shape
        if layout is not None:
            name, transposed = layouts.head_name(config, "/".join(path)) or (name, transposed)
            if path[0] == "confidence":  # a linear map to one number there: [1, D + R] and [1]
                shape = (1, *shape)
        entries[path] = Entry.of(name, shape, transposed), leaf.shape
    return entries


def _vocabulary_entries(config, layout):
    if config.draft_vocab_size == config.vocab_size:
        return []
    offsets = Entry(_OFFSETS, (config.draft_vocab_size,), dtype="I32" if layout is None else "I64")
    return [offsets] if layout is None else [offsets, Entry(_MEMBERS, (config.vocab_size,), dtype="BOOL")]


# ------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a directory declares, before any weight is read: ``layout`` is a name of `LAYOUTS`, ``target`` what it says
    of its target (`Drafter.target`), ``tensors`` where they lie."""

    directory: pathlib.Path
    layout: str
    config: DrafterConfig
    target: dict
    tensors: dict[str, safetensors_files.StoredTensor]

    @property
    def published(self):
        """The entry of the table of layouts; None for the native one."""
        return layouts.LAYOUTS.get(self.layout)


def open_checkpoint(directory) -> Checkpoint:
    """Reads config.json and the tensors' headers, and checks one against the other.

    Raises FileNotFoundError or ValueError that names the file and the field or tensor that is wrong.
    """
    directory = pathlib.Path(directory)
    path = directory / "config.json"
    fields = Fields.read(path)
    if fields.raw("architectures") == [ARCHITECTURE]:
        name, layout, config, facts = NATIVE, None, read_config(path), {}
    else:
        layout = layouts.recognise(fields)
        name, config, facts = layout.name, layouts.read(layout, fields), _target_facts(fields)
    stored = safetensors_files.read_directory(directory)
    if config.backbone.num_hidden_layers > len(stored):  # before a layer is made for each
        raise ValueError(f"{path}: num_hidden_layers: {config.backbone.num_hidden_layers}, but there are only "
                         f"{len(stored)} tensors")
    expected = [entry for entry, _ in _entries(config, layout).values()] + _vocabulary_entries(config, layout)
    expected += _table_entries(config, layout, stored)
    tensors.check(directory, stored, expected, _VERIFIERS if name == "speculators" else ())
    return Checkpoint(directory=directory, layout=name, config=config, target=facts, tensors=stored)


def _target_facts(fields):
    fields = fields.then(fields.inside("transformer_layer_config", required=False))
    facts = {name: fields.integer(name, None, least=1) for name in ("num_target_layers", "max_position_embeddings")}
    return {name: value for name, value in facts.items() if value is not None}


def _table_entries(config, layout, stored):
    """embed_tokens and lm_head, where the layout or, where it leaves a choice, the directory has them.

    With a choice both are there or neither, but for the head of a reduced vocabulary, which is always there.
    """
    if layout is None or layout.tables == "never":
        return []
    width, reduced = config.backbone.hidden_size, config.draft_vocab_size < config.vocab_size
    embedding, head = Entry(_EMBEDDING, (config.vocab_size, width)), Entry(_HEAD, (config.draft_vocab_size, width))
    if layout.tables == "always" or (not reduced and (_EMBEDDING in stored or _HEAD in stored)):
        return [embedding, head]
    return ([embedding] if _EMBEDDING in stored else []) + ([head] if reduced else [])


def load(directory, target=None) -> Drafter:
    """A drafter of any layout, attached to ``target``; without one it can be saved again but not decode.

    Weights keep their dtype (float16 becomes float32), those of the native layout become float32. Raises
    FileNotFoundError or ValueError that names the file and the field or tensor that is wrong or does not fit.
    """
    checkpoint = open_checkpoint(directory)
    config, stored, layout = checkpoint.config, checkpoint.tensors, checkpoint.published
    if target is not None:  # before the weights: what can be wrong is found early
        _check_target(checkpoint, target)
    dtype = jnp.float32 if layout is None else None
    params = {path: tensors.place(stored[entry.name], entry, shape, dtype)
              for path, (entry, shape) in _entries(config, layout).items()}
    params = traverse_util.unflatten_dict(params)
    draft_to_target = _read_vocabulary(checkpoint)
    if target is None:
        tables = [tensors.place(stored[name], Entry(name, stored[name].shape), stored[name].shape)
                  if name in stored else None for name in (_EMBEDDING, _HEAD)]
        ids = None if draft_to_target is None else jnp.asarray(draft_to_target, jnp.int32)
        owns_tables = any(table is not None for table in tables)
        return Drafter(config, params, *tables, ids, owns_tables, checkpoint.target)
    embedding = _own_table(stored, _EMBEDDING, target.embedding())
    rows = None
    if _HEAD in stored:
        theirs = target.head_rows()
        rows = _own_table(stored, _HEAD, theirs if draft_to_target is None else theirs[draft_to_target])
    return attach(config, params, target, draft_to_target, embedding, rows)


def _check_target(checkpoint, target):
    path, config, depth = checkpoint.directory / "config.json", checkpoint.config, target.config.num_hidden_layers
    stated = checkpoint.target.get("num_target_layers")
    if stated is not None and stated != depth:
        raise ValueError(f"{path}: num_target_layers: {stated}, but the target has {depth} layers; they must be equal")
    if checkpoint.published is not None and config.target_layer_ids[-1] == depth - 1:
        raise ValueError(f"{path}: target_layer_ids: {config.target_layer_ids}; must be below {depth - 1}: the output "
                         "of the target's last layer means two things, with and without the final norm")
    try:
        check_fit(config, target.config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_vocabulary(checkpoint):
    """Target ids [Vd] of a reduced vocabulary, None for a full one."""
    config = checkpoint.config
    if config.draft_vocab_size == config.vocab_size:
        return None
    offsets = checkpoint.tensors[_OFFSETS]
    ids = offsets.map().astype(np.int64) + np.arange(config.draft_vocab_size)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"{offsets.file}: tensor {_OFFSETS!r} points outside the vocabulary of {config.vocab_size}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{offsets.file}: tensor {_OFFSETS!r} names a target id twice")
    if checkpoint.published is not None:
        members = checkpoint.tensors[_MEMBERS].map()
        if not np.array_equal(np.flatnonzero(members), np.sort(ids)):
            raise ValueError(f"{offsets.file}: tensors {_OFFSETS!r} and {_MEMBERS!r} disagree on the draft vocabulary")
    return ids


def _own_table(stored, name, theirs):
    """A stored table, or None where there is none or it is bit for bit the target's, which is then shared."""
    if name not in stored or np.array_equal(stored[name].map(), np.asarray(theirs)):
        return None
    tensor = stored[name]
    return tensors.place(tensor, Entry(name, tensor.shape), tensor.shape)


# ------------------------------------------------------------------- writing


def save(drafter, directory, layout=NATIVE, dtype=None) -> None:
    """Write ``drafter`` to ``directory``, creating it.

    dtype: of the weights; None: bfloat16 in the native layout, else what the parameters have, so that what is read back
    is bit for bit the same. Raises ValueError for an unknown layout, or a drafter that it cannot express, which says
    why; nothing is written then.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r}; allowed: {', '.join(LAYOUTS)}")
    config, published = drafter.config, layouts.LAYOUTS.get(layout)
    arrays = traverse_util.flatten_dict(drafter.params)
    if dtype is None:
        dtype = jnp.bfloat16 if published is None else jnp.result_type(*arrays.values())
    dtype = jnp.dtype(dtype)
    tables = {}
    if published is None:
        if drafter.owns_tables:
            raise ValueError(f"layout {NATIVE!r} stores no embedding and no output table, and those of this drafter "
                             "are not the target's; allowed: 'deepspec', 'speculators'")
        data = {"architectures": [ARCHITECTURE], "model_type": "dspark_jax", **dataclasses.asdict(config)}
    else:
        if config.copy_length:
            raise ValueError(f"layout {layout!r} cannot express copy_length {config.copy_length}; allowed: 0")
        data = published.write(drafter) | {"dtype": dtype.name, "torch_dtype": dtype.name}
        if published.tables != "never":
            tables = {_EMBEDDING: drafter.embedding, _HEAD: drafter.head_rows}
            if any(table is None for table in tables.values()):
                raise ValueError(f"layout {layout!r} stores the target's embedding and output table, and this drafter "
                                 "was read without its target; give the target too")
    stored = {entry.name: entry.stored(np.asarray(arrays[path]).astype(dtype))
              for path, (entry, _) in _entries(config, published).items()}
    stored |= {name: np.asarray(table).astype(dtype) for name, table in tables.items()}
    if drafter.draft_to_target is not None:
        ids = np.asarray(drafter.draft_to_target)
        stored[_OFFSETS] = (ids - np.arange(len(ids))).astype(np.int32 if published is None else np.int64)
        if published is not None:
            stored[_MEMBERS] = np.zeros(config.vocab_size, bool)
            stored[_MEMBERS][ids] = True
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / safetensors_files.INDEX).exists():
        raise ValueError(f"{directory}: holds the shards of another checkpoint; choose another directory")
    safetensors_files.write_file(directory / safetensors_files.SINGLE, stored)
    with replacing(directory / "config.json", "w") as file:
        file.write(json.dumps(data, indent=2) + "\n")


def read_config(path):
    """config.json of a native drafter -> DrafterConfig. Raises ValueError naming the file and field."""
    path = pathlib.Path(path)
    data = safetensors_files.parse_json(path.read_bytes(), path)
    architectures = data.pop("architectures", None) if isinstance(data, dict) else None
    if architectures != [ARCHITECTURE]:
        raise ValueError(f"{path}: architectures is {architectures!r}; supported: [{ARCHITECTURE!r}]")
    data.pop("model_type", None)
    return config_from_dict(data, path)


def config_from_dict(data, path):
    """A DrafterConfig from nested plain values; unknown, missing or invalid fields raise ValueError naming ``path``."""
    try:
        data = _object(data, "config")
        backbone = _object(data.get("backbone"), "backbone")
        if backbone.get("rope_scaling") is not None:
            backbone["rope_scaling"] = _build(layers.RopeScaling, backbone["rope_scaling"], "rope_scaling")
        if "attention" in backbone:
            kinds = backbone["attention"]
            if not isinstance(kinds, (list, tuple)):
                raise ValueError(f"attention: {kinds!r}; must be a list with one object a layer")
            backbone["attention"] = tuple(_build(Attention, kind, f"attention[{i}]") for i, kind in enumerate(kinds))
        data["backbone"] = _build(BackboneConfig, backbone, "backbone")
        return _build(DrafterConfig, data, "config")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _object(data, what):
    if not isinstance(data, dict):
        raise ValueError(f"{what}: {data!r}; must be an object")
    return dict(data)


def _build(cls, data, what):
    """``cls(**data)`` where every field has the type that the dataclass declares."""
    data = _object(data, what)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ValueError(f"{what}: unknown field {unknown[0]!r}; allowed: {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in data and field.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{what}: field {missing[0]!r} is missing")
    values = {}
    for name, value in data.items():
        expected = fields[name].type
        if expected == tuple[int, ...]:
            good = isinstance(value, (list, tuple)) and all(type(v) is int for v in value)
            value, expected = tuple(value) if good else value, "a list of whole numbers"
        elif expected == tuple[float, ...]:
            good = isinstance(value, (list, tuple)) and all(type(v) in (int, float) for v in value)
            value, expected = tuple(map(float, value)) if good else value, "a list of numbers"
        elif expected is float:
            good, expected = type(value) in (int, float), "a number"
        elif not isinstance(expected, type):  # built above: a tuple of objects, or an object that can be absent
            good = True
        else:
            good, expected = type(value) is expected, expected.__name__
        if not good:
            raise ValueError(f"{name}: {value!r}; must be {expected}")
        values[name] = value
    return cls(**values)
