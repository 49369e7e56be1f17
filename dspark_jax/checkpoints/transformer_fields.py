"""The fields of config.json that targets and drafters share: sizes, rotary embedding, kinds of attention."""

from dspark_jax import layers
from dspark_jax.backbone import Attention
from dspark_jax.checkpoints.fields import Fields

DEEPEST = 1000  # layers; a number from a file must not decide how much is built before weights have been seen
FULL, SLIDING = "full_attention", "sliding_attention"


def read_sizes(fields: Fields) -> dict:
    """The arguments that `TargetConfig` and `BackboneConfig` have in common."""
    fields.text("hidden_act", "silu", allowed=("silu",))
    if fields.raw("quantization_config") is not None:
        raise ValueError(f"{fields.path}: quantization_config: quantised weights are not supported; must be absent")
    heads = fields.integer("num_attention_heads", least=1)
    hidden = fields.integer("hidden_size", least=1)
    kv_heads = fields.integer("num_key_value_heads", heads, least=1)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if not fields.has("head_dim") and hidden % heads:
        raise ValueError(f"{fields.path}: head_dim: is missing, and hidden_size {hidden} is no multiple of "
                         f"num_attention_heads {heads}")
    width = fields.integer("head_dim", hidden // heads, least=2)
    if width % 2:
        raise ValueError(f"{fields.path}: head_dim: {width}; must be even, rotary embedding turns pairs of channels")
    depth = fields.integer("num_hidden_layers", least=1)
    if depth > DEEPEST:
        fields.refuse("num_hidden_layers", f"at most {DEEPEST}")
    theta, scaling = read_rope(fields)
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", least=1),
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_bias": fields.boolean("attention_bias", False),
    }


def read_rope(fields: Fields) -> tuple[float, layers.RopeScaling | None]:
    """(theta, scaling) in either spelling: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Where both are there they must say the same.
    """
    spellings = []
    if fields.has("rope_parameters"):
        inner = fields.inside("rope_parameters")
        theta = inner.number("rope_theta", None)
        spellings.append((theta if theta is not None else fields.number("rope_theta", 10000.0), _read_scaling(inner)))
    if not spellings or fields.has("rope_scaling"):
        spellings.append((fields.number("rope_theta", spellings[0][0] if spellings else 10000.0),
                          _read_scaling(fields.inside("rope_scaling", required=False))))
    elif fields.has("rope_theta"):
        spellings.append((fields.number("rope_theta"), spellings[0][1]))
    if len(spellings) == 2 and spellings[0] != spellings[1]:
        raise ValueError(f"{fields.path}: rope_parameters: says {spellings[0]}, but rope_theta and rope_scaling say "
                         f"{spellings[1]}; must be the same, or one of them absent")
    return spellings[0]


def _read_scaling(fields):
    kind = fields.text("rope_type", None) or fields.text("type", "default")
    if kind == "default":
        return None
    values = {"factor": fields.number("factor")} if kind in ("linear", "llama3") else {"factor": 1.0}
    if kind == "llama3":
        values |= {name: fields.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        values["original_max_position_embeddings"] = fields.integer("original_max_position_embeddings", least=1)
    try:
        return layers.RopeScaling(kind=kind, **values)
    except ValueError as error:
        raise ValueError(f"{fields.path}: rope_scaling: {error}") from None


def write_rope(theta, scaling) -> dict:
    """Both spellings of the rotary embedding, for readers of either."""
    if scaling is None:
        kind = {"rope_type": "default"}
    else:
        kind = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            kind |= {name: getattr(scaling, name)
                     for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else kind,
        "rope_parameters": {"rope_theta": theta, **kind},
    }


def read_attention(fields: Fields, layers_count: int, causal) -> tuple[Attention, ...]:
    """One `Attention` a layer from layer_types, sliding_window and use_sliding_window.

    causal: (is the layer sliding) -> whether its slots see no later ones.
    """
    kinds = fields.texts("layer_types", None)
    if kinds is None:
        if fields.boolean("use_sliding_window", False):
            raise ValueError(f"{fields.path}: layer_types: is missing; use_sliding_window needs to say which layers")
        kinds = (FULL,) * layers_count
    if len(kinds) != layers_count or not set(kinds) <= {FULL, SLIDING}:
        fields.refuse("layer_types", f"{layers_count} times {FULL!r} or {SLIDING!r}")
    window = 0
    if SLIDING in kinds:
        window = fields.integer("sliding_window", least=1)
        if not fields.boolean("use_sliding_window", True):
            fields.refuse("use_sliding_window", f"true or absent where layer_types has {SLIDING!r}")
    return tuple(Attention(window=window if kind == SLIDING else 0, causal=causal(kind == SLIDING)) for kind in kinds)


def write_attention(backbone) -> dict:
    """layer_types, sliding_window and use_sliding_window. Raises ValueError for windows of several sizes."""
    kinds = [backbone.attention_of(i) for i in range(backbone.num_hidden_layers)]
    windows = {kind.window for kind in kinds if kind.window}
    if len(windows) > 1:
        raise ValueError(f"attention: windows of {sorted(windows)}; this layout has one sliding_window for all layers")
    return {
        "layer_types": [SLIDING if kind.window else FULL for kind in kinds],
        "use_sliding_window": bool(windows),
        "sliding_window": windows.pop() if windows else None,
    }
