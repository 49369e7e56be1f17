"""The target: a frozen Llama or Qwen3 decoder that also returns chosen hidden states.

B batch, Q new tokens, S cached positions, V vocabulary, D model width, K key/value heads, C head width.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dspark_jax import cache as kv
from dspark_jax import layers, packing

EMBEDDING = -1  # the tap that means the embedding output; tap i >= 0 is the raw output of decoder layer i


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Sizes of a dense decoder. ``qk_norm`` is Qwen3's RMS norm of query and key heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    qk_norm: bool = False
    stop_tokens: tuple[int, ...] = ()
    rope_scaling: layers.RopeScaling | None = None


class Ragged(NamedTuple):
    """N tokens of B rows side by side, for rows that process different numbers of tokens, at most Q.

    Token n is slot ``slots[n]`` of row ``rows[n]`` (int [N]); ``index`` int [B, Q] is where a slot lies among the N tokens,
    and for slots that a row doesn't use where its last one lies.
    """

    rows: jax.Array
    slots: jax.Array
    index: jax.Array

    @classmethod
    def of(cls, lengths, Q, N):
        """For rows of ``lengths`` int [B] in 0..Q tokens, sum(lengths) <= N.

        Places behind the last token belong to some slot of the last row; the slots of a row without tokens are anywhere.
        """
        ends = jnp.cumsum(lengths)
        begins, flat = ends - lengths, jnp.arange(N)
        rows = jnp.minimum(jnp.searchsorted(ends, flat, side="right"), lengths.shape[0] - 1)
        slots = jnp.minimum(flat - begins[rows], Q - 1)
        index = begins[:, None] + jnp.minimum(jnp.arange(Q), lengths[:, None] - 1)
        return cls(rows, slots, jnp.clip(index, 0, N - 1))


class DecoderLayer(nn.Module):
    """x += Attention(norm(x)); x += MLP(norm(x)). With a cache, keys and values are written at positions[:, 0].

    ``ragged``: x is [N, D], and only attention, which belongs to rows, is done on [B, Q]."""

    config: TargetConfig

    @nn.compact
    def __call__(self, x, positions, visible, cache, ragged=None):
        c = self.config
        attention = layers.AttentionProjections(
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size, c.rms_norm_eps, c.rope_theta,
            c.qk_norm, c.attention_bias, c.rope_scaling, name="self_attn")
        y = layers.RMSNorm(c.rms_norm_eps, name="input_layernorm")(x)
        query = attention.queries(y, positions)
        key, value = attention.keys_values(y, positions)
        if ragged is not None:
            query, key, value, positions = (a[ragged.index] for a in (query, key, value, positions))
        if cache is not None:
            key, value = cache = layers.apart(
                tuple(kv.write(old, new, positions[:, 0]) for old, new in zip(cache, (key, value))))
        else:
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        mixed = layers.attend(query, key, value, visible)
        x = x + attention.output(mixed if ragged is None else mixed[ragged.rows, ragged.slots])
        y = layers.RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        return x + layers.GatedMLP(c.intermediate_size, name="mlp")(y), cache


class OutputTable(nn.Module):
    """An output table [vocab_size, width] of its own, where it is not the embedding."""

    vocab_size: int

    @nn.compact
    def __call__(self, width):
        return self.param("weight", nn.initializers.normal(0.02), (self.vocab_size, width))


class Decoder(nn.Module):
    """A pre-norm decoder. Layers are unrolled, not scanned: a scan copies each layer's weights before it uses them,
    which on a CPU doubles the time of a decoding step."""

    config: TargetConfig

    def setup(self):
        c = self.config
        self.embed_tokens = nn.Embed(c.vocab_size, c.hidden_size, embedding_init=nn.initializers.normal(0.02))
        self.layers = [DecoderLayer(c) for _ in range(c.num_hidden_layers)]
        self.norm = layers.RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = OutputTable(c.vocab_size)

    def __call__(self, tokens, positions, cache=None, taps=(), ragged=None, documents=None):
        """tokens, positions int [B, Q] (positions of a row are consecutive) ->

        final-normed hidden [B, Q, D], list of tapped hidden states [B, Q, D] in the order of ``taps``, new cache or None.
        Without a cache the call is causal within itself; right padding is harmless because nothing looks ahead.
        With ``ragged`` (and a cache), [N] and [N, D] stand in place of [B, Q] and [B, Q, D].
        With ``documents`` int [B, Q] (and no cache) tokens see those of their own document only, and positions are
        consecutive within each.
        """
        queries = positions if ragged is None else positions[ragged.index]
        keys = queries[:, None, :] if cache is None else jnp.arange(cache[0][0].shape[2])
        visible = keys <= queries[:, :, None]
        if documents is not None:
            visible &= documents[:, None, :] == documents[:, :, None]
        x = self.embed_tokens(tokens)
        tapped = {EMBEDDING: x}
        new_cache = []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"target_layer_{i}"):
                x, pair = layer(x, positions, visible, None if cache is None else cache[i], ragged)
            tapped[i] = x
            new_cache.append(pair)
        return self.norm(x), [tapped[t] for t in taps], None if cache is None else tuple(new_cache)

    def logits(self, hidden):
        """Final-normed hidden [..., D] -> [..., V], in float32 or wider."""
        tied = self.config.tie_word_embeddings
        return layers.table_logits(hidden, self.embed_tokens.embedding if tied else self.lm_head(hidden.shape[-1]))

    def everything(self, tokens):  # init must touch every parameter
        hidden, _, _ = self(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
        return self.logits(hidden)


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(config, params, tokens, taps=(), documents=None):
    """tokens int [B, S] at positions 0..S-1, no cache -> (final-normed [B, S, D], list of tapped states [B, S, D]).

    documents int [B, S]: of packed rows (see `dspark_jax.packing`), whose positions restart in each document.
    """
    positions = jnp.arange(tokens.shape[1]) if documents is None else packing.positions(documents)
    positions = jnp.broadcast_to(positions, tokens.shape)
    hidden, tapped, _ = Decoder(config).apply(
        {"params": params}, tokens, positions, None, taps, documents=documents)
    return hidden, tapped


@functools.partial(jax.jit, static_argnums=0)
def head(config, params, hidden):
    """Final-normed hidden [..., D] -> logits [..., V]."""
    return Decoder(config).apply({"params": params}, hidden, method=Decoder.logits)


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: ``config``, ``params`` (nested dict of arrays) and ``tokenizer`` (None where there is none)."""

    config: TargetConfig
    params: dict
    tokenizer: object = None

    def logits(self, tokens):
        """tokens int [B, S] -> logits [B, S, V]."""
        hidden, _ = forward(self.config, self.params, self._checked(tokens))
        return head(self.config, self.params, hidden)

    def hidden_states(self, tokens):
        """tokens int [B, S] -> list of num_hidden_layers + 1 arrays [B, S, D]: embedding output, then raw layer outputs."""
        taps = (EMBEDDING, *range(self.config.num_hidden_layers))
        return forward(self.config, self.params, self._checked(tokens), taps)[1]

    def embedding(self):
        """The embedding table [V, D]."""
        return self.params["embed_tokens"]["embedding"]

    def head_rows(self):
        """The output table [V, D]: logits = hidden @ head_rows().T."""
        return self.embedding() if self.config.tie_word_embeddings else self.params["lm_head"]["weight"]

    def _checked(self, tokens):
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.size == 0:
            raise ValueError(f"tokens must have shape [batch, length] and not be empty, got shape {tokens.shape}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens must be whole numbers, got {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"token ids must lie in [0, {self.config.vocab_size}), got {tokens.min()}..{tokens.max()}")
        if tokens.shape[1] > self.config.max_position_embeddings:
            raise ValueError(f"{tokens.shape[1]} tokens exceed the target's context of {self.config.max_position_embeddings}")
        return jnp.asarray(tokens, jnp.int32)
