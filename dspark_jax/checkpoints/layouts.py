"""The published layouts of a drafter: what config.json says and what the tensors are called.

| layout | architectures | where fields lie | tables stored |
|---|---|---|---|
| deepspec | Qwen3DSparkModel | at the top | embed_tokens, lm_head |
| z-lab | DFlashDraftModel, DFlash2DraftModel | in dflash_config, then at the top | none |
| speculators | any, but speculators_model_type | at the top, sizes in transformer_layer_config | both or none [1] |
| specforge | DSparkDraftModel | in dflash_config, then at the top | none |

[1] with a reduced vocabulary always lm_head, and d2t and t2d.

Which slot of a block predicts what is never guessed: each layout has one block layout of its own, `sample_from_anchor`
may state another, and it is always written. `LAYOUTS` is the whole list; a new layout is one entry.
"""

import dataclasses
from collections.abc import Callable

from dspark_jax.backbone import BackboneConfig
from dspark_jax.checkpoints import transformer_fields
from dspark_jax.checkpoints.fields import Fields
from dspark_jax.drafter import Drafter, DrafterConfig

MARKOV_TYPES = {"vanilla": "vanilla", "gated": "joint", "rnn": "recurrent"}  # published name -> our transition
OURS = "dspark_jax"  # a section that other readers ignore: what their format has no field for

MARKOV_NAMES = {  # our path -> (published name, stored transposed)
    "transition/predecessor": ("markov_head.markov_w1.weight", False),
    "transition/successor": ("markov_head.markov_w2.weight", False),
    "transition/gate_kernel": ("markov_head.gate_proj.weight", True),
    "transition/gate_bias": ("markov_head.gate_proj.bias", False),
    "transition/joint_kernel": ("markov_head.joint_proj.weight", True),
    "transition/joint_bias": ("markov_head.joint_proj.bias", False),
}
_SELECTOR_NAMES = {
    "transition/predecessor": ("candidate_selector.predecessor_codebook", False),
    "transition/successor": ("candidate_selector.successor_codebook", False),
    "transition/hidden_projection": ("candidate_selector.hidden_projection.weight", True),
}
CONFIDENCE_NAMES = {
    "confidence/kernel": ("confidence_head.proj.weight", False),
    "confidence/bias": ("confidence_head.proj.bias", False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the table.

    Attributes:
      name: as `save_drafter` takes it.
      owner: whose layout it is, for messages.
      claims: fields of a config.json -> whether it is of this layout.
      read: fields -> `DrafterConfig`.
      write: `Drafter` -> the dict of config.json; raises ValueError for a drafter that the layout cannot express.
      tables: whether embed_tokens.weight and lm_head.weight are "always" stored, "never", or "optional".
    """

    name: str
    owner: str
    claims: Callable[[Fields], bool]
    read: Callable[[Fields], DrafterConfig]
    write: Callable[[Drafter], dict]
    tables: str


def head_name(config: DrafterConfig, path: str) -> tuple[str, bool] | None:
    """The published (name, stored transposed) of a path of the transition or the confidence head, None for others."""
    names = _SELECTOR_NAMES if config.transition == "context" else MARKOV_NAMES
    return names.get(path) or CONFIDENCE_NAMES.get(path)


# ------------------------------------------------------------------- reading


def _architecture(fields):
    architectures = fields.texts("architectures", ())
    return architectures[0] if len(architectures) == 1 else None


def _backbone(fields, causal, **more):
    sizes = transformer_fields.read_sizes(fields)
    attention = transformer_fields.read_attention(fields, sizes["num_hidden_layers"], causal)
    return BackboneConfig(**sizes, attention=attention, **more)


def _causality(fields):
    """is_causal true or false: of every layer; absent: sliding layers are causal inside the block, full ones not."""
    stated = fields.boolean("is_causal", None)
    return lambda sliding: sliding if stated is None else stated


def _block(fields, sample_from_anchor):
    """Layout and length of a block of ``block_size`` slots."""
    anchor_first = fields.boolean("sample_from_anchor", sample_from_anchor)
    slots = fields.integer("block_size", least=1 if anchor_first else 2)
    if slots > 1024:
        fields.refuse("block_size", "at most 1024")
    if anchor_first:
        return {"layout": "anchor_first", "block_length": slots}
    return {"layout": "fill_in", "block_length": slots - 1}


def _markov(fields, vocab_size):
    rank = fields.integer("markov_rank")
    transition = "none"
    if rank:
        transition = MARKOV_TYPES[fields.text("markov_head_type", "vanilla", allowed=tuple(MARKOV_TYPES))]
    head = {"transition": transition, "rank": rank} | _execution(fields, "sequential", min(16, vocab_size))
    if fields.boolean("enable_confidence_head", False):
        with_predecessor = fields.boolean("confidence_head_with_markov", False)
        if with_predecessor and not rank:
            fields.refuse("confidence_head_with_markov", "false where markov_rank is 0")
        head |= {"confidence": True, "confidence_with_predecessor": with_predecessor}
    return head


def _selector(fields, vocab_size):
    candidates = fields.integer("selector_top_k", 16, least=1)
    if candidates > vocab_size:
        fields.refuse("selector_top_k", f"at most the vocabulary of {vocab_size}")
    return {"transition": "context", "rank": fields.integer("selector_rank", 256, least=1)} | _execution(
        fields, "lattice", candidates)


def _execution(fields, execution, candidates):
    ours = fields.inside(OURS, required=False)
    return {"execution": ours.text("execution", execution, allowed=("sequential", "lattice")),
            "candidates": ours.integer("candidates", candidates, least=1)}


def _convolution(fields):
    return {"conv_kernel_size": fields.integer("conv_kernel_size", 2, least=1),
            "conv_group_size": fields.integer("conv_group_size", 16, least=1)}


def _scales(fields):
    softcap = fields.number("final_logit_softcapping", 0.0, positive=False)
    if softcap < 0:
        fields.refuse("final_logit_softcapping", "a positive number, or 0 for none")
    return {"output_multiplier": fields.number("output_multiplier", 1.0), "final_logit_softcapping": softcap,
            "input_embedding_scale": fields.number("input_embedding_scale", 1.0)}


def _taps(fields, name="target_layer_ids", offset=0):
    """target_layer_ids: required. Defaults computed from the depth repeat layers where a target is shallow."""
    ids = tuple(i - offset for i in fields.integers(name, least=offset - 1))
    if not ids or list(ids) != sorted(set(ids)):
        fields.refuse(name, "strictly increasing and not empty")
    depth = fields.integer("num_target_layers", None, least=1)
    if depth is not None and ids[-1] >= depth - 1:
        fields.refuse(name, f"at most {depth - 2 + offset}: the target has {depth} layers, and the output of the last "
                      "one means two things, with and without the final norm")
    return ids


def _vocabulary(fields, sizes=None):
    vocab_size = (sizes or fields).integer("vocab_size", least=1)
    draft = fields.integer("draft_vocab_size", vocab_size, least=1)
    if draft > vocab_size:
        fields.refuse("draft_vocab_size", f"at most vocab_size, {vocab_size}")
    mask = fields.integer("mask_token_id")
    if mask >= vocab_size:
        fields.refuse("mask_token_id", f"below vocab_size, {vocab_size}")
    return {"vocab_size": vocab_size, "draft_vocab_size": draft, "mask_token_id": mask}


def _read_deepspec(fields):
    if transformer_fields.SLIDING in fields.texts("layer_types", ()):
        fields.refuse("layer_types", f"{transformer_fields.FULL!r} only: DeepSpec's own code gives windows no effect")
    if fields.boolean("tie_word_embeddings", False):
        fields.refuse("tie_word_embeddings", "false: embed_tokens and lm_head are stored apart")
    vocabulary = _vocabulary(fields)
    return DrafterConfig(
        backbone=_backbone(fields, lambda sliding: False), target_layer_ids=_taps(fields), **_block(fields, True),
        **vocabulary, **_markov(fields, vocabulary["draft_vocab_size"]))


def _read_zlab(fields):
    own = fields.preferring("dflash_config")
    selector = _architecture(fields) == "DFlash2DraftModel"
    kind = own.text("projector_type", "dflash2" if selector else "dflash", allowed=("dflash", "dflash2"))
    if selector and kind != "dflash2":
        own.refuse("projector_type", "'dflash2' for DFlash2DraftModel")
    vocabulary = _vocabulary(own)
    backbone = _backbone(own, _causality(own), **(_convolution(own) if kind == "dflash2" else {}))
    head = {"transition": "none", "rank": 0} | _execution(own, "sequential", min(16, vocabulary["draft_vocab_size"]))
    if kind == "dflash2":
        head = _selector(own, vocabulary["draft_vocab_size"])
    return DrafterConfig(
        backbone=backbone, target_layer_ids=_taps(own), **_block(own, False), **vocabulary, **head, **_scales(own))


def _read_specforge(fields):
    own = fields.preferring("dflash_config")
    own.text("projector_type", "dspark", allowed=("dspark",))
    vocabulary = _vocabulary(own)
    return DrafterConfig(
        backbone=_backbone(own, _causality(own)), target_layer_ids=_taps(own), **_block(own, True), **vocabulary,
        **_markov(own, vocabulary["draft_vocab_size"]), **_scales(own))


def _read_speculators(fields):
    kind = fields.text("speculators_model_type", allowed=("dflash", "dspark", "dflash2"))
    fields.text("projector_type", "dflash", allowed=("dflash",))
    sizes = fields.inside("transformer_layer_config")
    non_causal = fields.boolean("sliding_window_non_causal", kind == "dflash2")
    backbone = _backbone(
        sizes, lambda sliding: sliding and not non_causal, **(_convolution(fields) if kind == "dflash2" else {}))
    width = fields.integer("target_hidden_size", backbone.hidden_size, least=1)
    if width != backbone.hidden_size:
        fields.refuse("target_hidden_size", f"the drafter's hidden_size, {backbone.hidden_size}")
    vocabulary = _vocabulary(fields, sizes)
    head = {"transition": "none", "rank": 0} | _execution(fields, "sequential", min(16, vocabulary["draft_vocab_size"]))
    if kind == "dspark":
        head = _markov(fields, vocabulary["draft_vocab_size"])
    elif kind == "dflash2":
        head = _selector(fields, vocabulary["draft_vocab_size"])
    block = _block(fields, kind == "dspark")
    _check_proposals(fields, block["block_length"])
    return DrafterConfig(
        backbone=backbone, target_layer_ids=_taps(fields, "aux_hidden_state_layer_ids", offset=1), **block,
        **vocabulary, **head, **_scales(fields))


def _check_proposals(fields, length):
    """speculators_config.proposal_methods may ask for fewer drafts than a block gives, but not for more."""
    methods = fields.inside("speculators_config", required=False).raw("proposal_methods")
    for method in methods if isinstance(methods, list) else []:
        tokens = method.get("speculative_tokens") if isinstance(method, dict) else None
        if tokens is not None and (not isinstance(tokens, int) or not 1 <= tokens <= length):
            raise ValueError(f"{fields.path}: speculators_config.proposal_methods: speculative_tokens {tokens!r}; must "
                             f"lie in [1, {length}], what block_size and sample_from_anchor give")


# ------------------------------------------------------------------- writing


def _refuse(layout, field, value, allowed):
    raise ValueError(f"layout {layout!r} cannot express {field} {value!r}; allowed: {allowed}")


def _require(layout_name, config, /, **allowed):
    for field, values in allowed.items():
        value = getattr(config, field)
        if value not in values:
            _refuse(layout_name, field, value, ", ".join(map(repr, values)))


def _full_vocabulary(layout, config):
    if config.draft_vocab_size != config.vocab_size:
        _refuse(layout, "draft_vocab_size", config.draft_vocab_size,
                f"vocab_size, {config.vocab_size}; the layout 'speculators' has reduced vocabularies")


def _no_scales(layout, config):
    _require(layout, config, output_multiplier=(1.0,), final_logit_softcapping=(0.0,), input_embedding_scale=(1.0,))


def _write_sizes(drafter):
    b = drafter.config.backbone
    facts = {"max_position_embeddings": drafter.target.get("max_position_embeddings")}
    return {
        "model_type": "qwen3", "vocab_size": drafter.config.vocab_size, "hidden_size": b.hidden_size,
        "intermediate_size": b.intermediate_size, "num_hidden_layers": b.num_hidden_layers,
        "num_attention_heads": b.num_attention_heads, "num_key_value_heads": b.num_key_value_heads,
        "head_dim": b.head_dim, "hidden_act": "silu", "rms_norm_eps": b.rms_norm_eps,
        "attention_bias": b.attention_bias, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "tie_word_embeddings": False, "max_window_layers": b.num_hidden_layers,
    } | {k: v for k, v in facts.items() if v} | transformer_fields.write_rope(b.rope_theta, b.rope_scaling) | (
        transformer_fields.write_attention(b))


def _write_block(config):
    return {"block_size": config.slots, "sample_from_anchor": config.layout == "anchor_first"}


def _write_depth(drafter):
    depth = drafter.target.get("num_target_layers")
    if depth and drafter.config.target_layer_ids[-1] >= depth - 1:
        raise ValueError(f"target_layer_ids {drafter.config.target_layer_ids}: the output of the last target layer, "
                         f"{depth - 1}, means two things to readers of published layouts; allowed: at most {depth - 2}")
    return {"num_target_layers": depth} if depth else {}


def _write_markov(layout, config):
    if config.confidence:
        _require(layout, config, confidence_with_law=(False,))
    names = {ours: published for published, ours in MARKOV_TYPES.items()}
    head = {"markov_rank": 0, "enable_confidence_head": config.confidence}
    if config.transition != "none":
        head |= {"markov_rank": config.rank, "markov_head_type": names[config.transition]}
    if config.confidence:
        head["confidence_head_with_markov"] = config.confidence_with_predecessor
    return head


def _write_selector(config):
    return {"conv_kernel_size": config.backbone.conv_kernel_size, "conv_group_size": config.backbone.conv_group_size,
            "selector_rank": config.rank, "selector_top_k": config.candidates}


def _write_scales(config):
    return {name: value for name, value, neutral in (
        ("output_multiplier", config.output_multiplier, 1.0),
        ("final_logit_softcapping", config.final_logit_softcapping, 0.0),
        ("input_embedding_scale", config.input_embedding_scale, 1.0)) if value != neutral}


def _write_ours(config, execution, candidates):
    """The section of our own, where execution or candidates differ from what the layout's reader takes for granted."""
    ours = {}
    if config.execution != execution:
        ours["execution"] = config.execution
    if config.candidates != candidates:
        ours["candidates"] = config.candidates
    return {OURS: ours} if ours else {}


def _write_causality(layout, backbone):
    """is_causal, absent exactly where sliding layers are causal and full ones are not."""
    kinds = [backbone.attention_of(i) for i in range(backbone.num_hidden_layers)]
    stated = {kind.causal for kind in kinds}
    if len(stated) == 1:
        return {"is_causal": stated.pop()}
    if any(kind.causal != bool(kind.window) for kind in kinds):
        _refuse(layout, "attention", backbone.attention, "causality of all layers, of none, or of the sliding ones")
    return {}


def _write_deepspec(drafter):
    c = drafter.config
    _require("deepspec", c, transition=("none", *MARKOV_TYPES.values()), layout=("anchor_first",))
    _require("deepspec", c.backbone, conv_kernel_size=(0,), attention=((),))
    _full_vocabulary("deepspec", c)
    _no_scales("deepspec", c)
    return {"architectures": ["Qwen3DSparkModel"], **_write_sizes(drafter), **_write_block(c), **_write_depth(drafter),
            "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids), "num_anchors": 512,
            **_write_markov("deepspec", c), **_write_ours(c, "sequential", min(16, c.draft_vocab_size))}


def _write_zlab(drafter):
    c = drafter.config
    _require("z-lab", c, transition=("none", "context"), layout=("fill_in",), confidence=(False,))
    _full_vocabulary("z-lab", c)
    _no_tables("z-lab", drafter)
    selector = c.transition == "context"
    if bool(c.backbone.conv_kernel_size) != selector:
        _refuse("z-lab", "conv_kernel_size", c.backbone.conv_kernel_size,
                "a convolution exactly where there is a Selector, transition 'context'; see train.convert --help")
    own = {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids), **_write_scales(c)}
    top = _write_block(c)
    if selector:
        own |= _write_selector(c) | {"block_size": top.pop("block_size")}
    return {"architectures": ["DFlash2DraftModel" if selector else "DFlashDraftModel"], **_write_sizes(drafter), **top,
            **_write_depth(drafter), **_write_causality("z-lab", c.backbone), "dflash_config": own,
            **_write_ours(c, *(("lattice", c.candidates) if selector else ("sequential", min(16, c.draft_vocab_size))))}


def _write_specforge(drafter):
    c = drafter.config
    _require("specforge", c, transition=("none", *MARKOV_TYPES.values()), layout=("anchor_first",))
    _require("specforge", c.backbone, conv_kernel_size=(0,))
    _full_vocabulary("specforge", c)
    _no_tables("specforge", drafter)
    # The head is named at the top as well: that is where a server looks for it.
    own = {"projector_type": "dspark", "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids),
           **_write_markov("specforge", c), **_write_scales(c)}
    return {"architectures": ["DSparkDraftModel"], **_write_sizes(drafter), **_write_block(c), **_write_depth(drafter),
            **_write_causality("specforge", c.backbone), **_write_markov("specforge", c), "dflash_config": own,
            **_write_ours(c, "sequential", min(16, c.draft_vocab_size))}


def _write_speculators(drafter):
    c = drafter.config
    kinds = [c.backbone.attention_of(i) for i in range(c.backbone.num_hidden_layers)]
    if any(kind.causal and not kind.window for kind in kinds) or len({k.causal for k in kinds if k.window}) > 1:
        _refuse("speculators", "attention", c.backbone.attention, "full layers not causal, sliding ones all alike")
    _no_scales("speculators", c)
    convolution = bool(c.backbone.conv_kernel_size)
    if c.transition == "context":
        kind, head = "dflash2", _write_selector(c)
        _require("speculators", c, confidence=(False,))
    elif c.transition == "none" and c.layout == "fill_in" and not c.confidence:
        kind, head = "dflash", {}
    else:
        kind, head = "dspark", _write_markov("speculators", c)
    if convolution != (kind == "dflash2"):
        _refuse("speculators", "conv_kernel_size", c.backbone.conv_kernel_size,
                "a convolution exactly where there is a Selector, transition 'context'; see train.convert --help")
    name = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}[kind]
    sizes = _write_sizes(drafter)
    sliding_causal = any(kind.window and kind.causal for kind in kinds)
    given = ("lattice", c.candidates) if kind == "dflash2" else ("sequential", min(16, c.draft_vocab_size))
    return {
        "architectures": [name], "speculators_model_type": kind, "transformer_layer_config": sizes,
        "draft_vocab_size": c.draft_vocab_size, **_write_block(c), **_write_depth(drafter),
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids], "mask_token_id": c.mask_token_id,
        "sliding_window_non_causal": not sliding_causal, **head,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.block_length}],
            "verifier": {"name_or_path": None, "architectures": []},
        }, **_write_ours(c, *given)}


def _no_tables(layout, drafter):
    if drafter.owns_tables:
        _refuse(layout, "owns_tables", True, "False: the layout stores no embedding and no output table, and those of "
                "this drafter are not the target's")


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(name="speculators", owner="vLLM speculators", claims=lambda f: f.has("speculators_model_type"),
               read=_read_speculators, write=_write_speculators, tables="optional"),
        Layout(name="deepspec", owner="DeepSpec", claims=lambda f: _architecture(f) == "Qwen3DSparkModel",
               read=_read_deepspec, write=_write_deepspec, tables="always"),
        Layout(name="z-lab", owner="z-lab/dflash", read=_read_zlab, write=_write_zlab, tables="never",
               claims=lambda f: _architecture(f) in ("DFlashDraftModel", "DFlash2DraftModel")),
        Layout(name="specforge", owner="SpecForge", claims=lambda f: _architecture(f) == "DSparkDraftModel",
               read=_read_specforge, write=_write_specforge, tables="never"),
    )
}
ARCHITECTURES = ("Qwen3DSparkModel", "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel")


def recognise(fields: Fields) -> Layout:
    """The layout of a config.json. Raises ValueError that lists what is known."""
    for layout in LAYOUTS.values():
        if layout.claims(fields):
            return layout
    fields.refuse("architectures", f"one of {', '.join(repr([name]) for name in ARCHITECTURES)} for a drafter, or "
                  "speculators_model_type must be there")


def read(layout: Layout, fields: Fields) -> DrafterConfig:
    """config.json -> `DrafterConfig`. Raises ValueError that names the file and the field."""
    try:
        return layout.read(fields)
    except ValueError as error:
        # What a config class refuses by itself does not know the file.
        raise ValueError(str(error) if str(error).startswith(str(fields.path)) else f"{fields.path}: {error}") from None
