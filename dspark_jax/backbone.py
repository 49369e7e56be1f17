"""The parallel drafter backbone: all slots of a block in one pass, over keys and values made from target features.

    c        = hidden_norm(fc(features))                                features: tapped target states side by side
    keys, values of a layer = W_k, W_v applied to [c ; norm(x)]         context first, then the block's own slots
    x       += Attention(norm(x));  x += MLP(norm(x));  h = norm(x)

Context keys never see a draft layer, so they can be computed once per token and cached.
Layers can differ in what their slots see (`Attention`): a sliding window, over context and block alike, and causality
inside the block. Visible context keys lie before every slot, at the positions 0..S-1 unless others are given.
B batch, S context length, N blocks, J slots per block, D model width, K key/value heads, C head width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from dspark_jax import convolution, layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """What the slots of a layer see: keys with |query - key| < ``window`` (0: all of them), and, where ``causal``, no
    later slots of their own block."""

    window: int = 0
    causal: bool = False

    def __post_init__(self):
        if self.window < 0:
            raise ValueError(f"window: {self.window}; must be positive, or 0 for none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Sizes of the backbone. ``conv_kernel_size`` 0 means no convolution (DFlash, DSpark); DFlash-2 has 2.

    ``attention``: one `Attention` a layer; empty where all layers see everything.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    rope_scaling: layers.RopeScaling | None = None
    attention: tuple[Attention, ...] = ()

    def __post_init__(self):
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim", "conv_group_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}; must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads: {self.num_key_value_heads}; must divide the "
                             f"{self.num_attention_heads} attention heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim}; must be even, for rotary positions")
        if not 0 <= self.conv_kernel_size <= 64:  # taps are unrolled: a file must not decide how long that takes
            raise ValueError(f"conv_kernel_size: {self.conv_kernel_size}; must lie in [0, 64], 0 for none")
        if self.num_hidden_layers > 1000:  # so are layers
            raise ValueError(f"num_hidden_layers: {self.num_hidden_layers}; at most 1000")
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size: {self.conv_group_size}; must divide hidden_size {self.hidden_size}")
        if self.attention and len(self.attention) != self.num_hidden_layers:
            raise ValueError(f"attention: {len(self.attention)} entries for {self.num_hidden_layers} layers")
        if all(kind == Attention() for kind in self.attention):
            object.__setattr__(self, "attention", ())  # one spelling, so that equal configs compare equal

    def attention_of(self, layer):
        """The `Attention` of layer ``layer``."""
        return self.attention[layer] if self.attention else Attention()


def attend_context_and_block(query, context, block, visible, inside=None):
    """Attention of every slot over the visible context and over the slots of its own block.

    query [B, N, J, H, C]; context (key, value) [B, S, K, C]; block (key, value) [B, N, J, K, C]; visible bool
    [B, N, S], or [B, N, J, S] where slots differ; inside bool [J, J], which slot sees which, None for all.
    One softmax over S + J keys -> [B, N, J, H*C]. A block with no visible context still sees itself.
    """
    kv_heads, width = context[0].shape[-2:]
    query = query.reshape(*query.shape[:-2], kv_heads, -1, width) * width**-0.5
    outer = jnp.einsum("BNJKGC,BSKC->BNKGJS", query, context[0], preferred_element_type=jnp.float32)
    inner = jnp.einsum("BNJKGC,BNIKC->BNKGJI", query, block[0], preferred_element_type=jnp.float32)
    visible = visible[:, :, None] if visible.ndim == 3 else visible
    outer = jnp.where(visible[:, :, None, None], outer, layers.MASKED)
    if inside is not None:
        inner = jnp.where(inside, inner, layers.MASKED)
    weights = jax.nn.softmax(jnp.concatenate([outer, inner], axis=-1), axis=-1).astype(query.dtype)
    split = outer.shape[-1]
    mixed = jnp.einsum("BNKGJS,BSKC->BNJKGC", weights[..., :split], context[1])
    mixed += jnp.einsum("BNKGJI,BNIKC->BNJKGC", weights[..., split:], block[1])
    return mixed.reshape(*mixed.shape[:3], -1)


def restrict(kind, visible, positions, context_positions=None):
    """What an `Attention` leaves of a block's view: visible bool [B, N, S], positions int [B, N, J], context_positions
    int [B, S] (None: 0..S-1) ->
    (visible bool [B, N, S] or [B, N, J, S], inside bool [J, J] or None), for `attend_context_and_block`."""
    inside = None
    if kind.window or kind.causal:
        slot = jnp.arange(positions.shape[-1])
        behind = slot[:, None] - slot  # how far key slot i lies behind query slot j
        inside = jnp.ones(behind.shape, bool)
        if kind.causal:
            inside &= behind >= 0
        if kind.window:
            inside &= jnp.abs(behind) < kind.window
            if context_positions is None:
                context_positions = jnp.arange(visible.shape[-1])[None]
            near = positions[..., None] - context_positions[:, None, None] < kind.window  # visible keys are never ahead
            visible = visible[:, :, None] & near
    return visible, inside


class DynamicConvolution(nn.Module):
    """The convolution pair around one sublayer; starts as the identity, so that DFlash weights can be warm-started."""

    taps: int
    group: int

    @nn.compact
    def __call__(self, x, sublayer):
        width = x.shape[-1]
        base = self.param("base_kernel", lambda key: convolution.identity_base(self.taps, width))
        kernel = self.param("kernel_projection", nn.initializers.zeros, (width, 2 * self.taps * width // self.group))
        dynamic = convolution.dynamic_kernels(x, kernel, self.taps)
        y = sublayer(convolution.convolve(x, base[0], dynamic[..., 0, :, :]))
        return convolution.convolve(y, base[1], dynamic[..., 1, :, :])


class BackboneLayer(nn.Module):
    config: BackboneConfig
    attention: Attention = Attention()

    def setup(self):
        c = self.config
        self.self_attn = layers.AttentionProjections(
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size, c.rms_norm_eps, c.rope_theta,
            qk_norm=True, use_bias=c.attention_bias, rope_scaling=c.rope_scaling)
        self.mlp = layers.GatedMLP(c.intermediate_size)
        self.input_layernorm = layers.RMSNorm(c.rms_norm_eps)
        self.post_attention_layernorm = layers.RMSNorm(c.rms_norm_eps)
        if c.conv_kernel_size:
            self.attention_conv = DynamicConvolution(c.conv_kernel_size, c.conv_group_size)
            self.mlp_conv = DynamicConvolution(c.conv_kernel_size, c.conv_group_size)

    def context_keys_values(self, context, positions):
        return self.self_attn.keys_values(context, positions)

    def __call__(self, x, positions, context, visible, context_positions=None):
        visible, inside = restrict(self.attention, visible, positions, context_positions)

        def attention(y):
            query = self.self_attn.queries(y, positions)
            block = self.self_attn.keys_values(y, positions)
            return self.self_attn.output(attend_context_and_block(query, context, block, visible, inside))

        if not self.config.conv_kernel_size:
            x = x + attention(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.attention_conv(self.input_layernorm(x), attention)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class Backbone(nn.Module):
    config: BackboneConfig

    def setup(self):
        self.fc = layers.Linear(self.config.hidden_size)
        self.hidden_norm = layers.RMSNorm(self.config.rms_norm_eps)
        self.layers = [
            BackboneLayer(self.config, self.config.attention_of(i)) for i in range(self.config.num_hidden_layers)]
        self.norm = layers.RMSNorm(self.config.rms_norm_eps)

    def context(self, features, positions):
        """features [B, S, taps * D], positions int [B, S] -> a (key, value) pair [B, S, K, C] for each layer."""
        with jax.named_scope("draft_context"):
            context = self.hidden_norm(self.fc(features))
            return tuple(layer.context_keys_values(context, positions) for layer in self.layers)

    def block(self, embeddings, positions, context, visible, context_positions=None):
        """Slot embeddings [B, N, J, D], positions int [B, N, J], context pairs, visible bool [B, N, S],
        context_positions int [B, S] (None: 0..S-1) -> hidden states after the final norm [B, N, J, D]."""
        x = embeddings
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{i}"):
                x = layer(x, positions, context[i], visible, context_positions)
        return self.norm(x)
