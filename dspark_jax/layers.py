"""Layers shared by target and drafter, as functions on arrays.

B batch, Q query length, S key length, D model width, H query heads, K key/value heads, C head width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

MASKED = -1e30  # finite, so that a row with nothing visible stays free of NaN
ROWS = 256  # queries at a time on an accelerator: of 8 heads and 4,096 keys, 32 MB of scores
FEW_ROWS = 64  # up to so many vectors at once, a CPU multiplies faster by columns; measured from 2 to 64, equal at 128


def rms_norm(x, weight, epsilon):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis, computed in float32, returned in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * weight).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than a model was first trained on.

    ``kind`` "linear": every frequency divided by ``factor``. "llama3": only those whose wave is longer than
    original_max_position_embeddings / low_freq_factor; those shorter than original / high_freq_factor stay, with a ramp
    between (Llama 3.1). Raises ValueError for another kind or values that give no such ramp.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope_type: {self.kind!r}; allowed: 'default', 'linear', 'llama3'")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"factor: {self.factor}; must be a number of at least 1")
        if self.kind == "llama3":
            if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
                raise ValueError(f"low_freq_factor: {self.low_freq_factor}; must be positive and smaller than "
                                 f"high_freq_factor, {self.high_freq_factor}")
            if self.original_max_position_embeddings < 1:
                raise ValueError(f"original_max_position_embeddings: {self.original_max_position_embeddings}; must be "
                                 "at least 1")


def rotary_frequencies(half, theta, scaling=None):
    """Radians per position of the channel pairs i = 0..half-1: theta^(-i/half), stretched by ``scaling``. [half]."""
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # of the wave, in the first context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0, 1)
    return keep * frequency + (1 - keep) * slow


def rotate(x, positions, theta, scaling=None):
    """Rotary position embedding, half-split convention (channel i turns with channel i + C/2).

    x [..., Q, heads, C], positions int [..., Q] -> same shape and dtype as x.
    The angle of pair i at position p is p * theta^(-2i/C), or slower under a `RopeScaling`.
    """
    half = x.shape[-1] // 2
    angle = positions[..., None, None].astype(jnp.float32) * rotary_frequencies(half, theta, scaling)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def apart(x):
    """x; on a CPU behind a barrier, where XLA would fold transpositions into products that are then several times slower."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def attend(query, key, value, visible):
    """Grouped-query attention, softmax(q.k / sqrt(C)) v where ``visible`` bool [B, Q, S] allows it.

    query [B, Q, H, C], key and value [B, K, S, C] -> [B, Q, H*C]; scores in float32.
    """
    return jax.lax.platform_dependent(query, key, value, visible, cpu=attend_by_columns, default=attend_by_rows)


def attend_by_rows(query, key, value, visible):
    """`attend` as an accelerator does it well: some queries at a time, so that their scores stay in its fast memory."""
    B, Q, H, C = query.shape

    def block(query, visible):
        query = query.reshape(B, -1, key.shape[1], H // key.shape[1], C)
        scores = jnp.einsum("BQKGC,BKSC->BKGQS", query, key, preferred_element_type=jnp.float32) * C**-0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1).astype(value.dtype)
        return jnp.einsum("BKGQS,BKSC->BQKGC", weights, value).reshape(B, -1, H * C)

    if Q % ROWS:
        return block(query, visible)
    split = lambda x: jnp.moveaxis(x.reshape(B, -1, ROWS, *x.shape[2:]), 1, 0)
    mixed = jax.lax.map(lambda part: block(*part), (split(query), split(visible)))
    return jnp.moveaxis(mixed, 0, 1).reshape(B, Q, H * C)


def attend_by_columns(query, key, value, visible):
    """`attend` as a CPU does it well: both products as plain ones over the B K heads, [S, C] times the queries as columns
    and weights times [S, C]."""
    B, Q, H, C = query.shape
    K, S = key.shape[1:3]
    G = H // K
    columns = query.reshape(B, Q, K, G, C).transpose(0, 2, 4, 3, 1).reshape(B * K, C, G * Q)
    scores = apart(jnp.matmul(key.reshape(B * K, S, C), apart(columns), preferred_element_type=jnp.float32)) * C**-0.5
    scores = scores.reshape(B, K, S, G, Q).transpose(0, 1, 3, 4, 2)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1).astype(value.dtype)
    mixed = apart(jnp.matmul(apart(weights.reshape(B * K, G * Q, S)), value.reshape(B * K, S, C),
                             preferred_element_type=jnp.promote_types(value.dtype, jnp.float32))).astype(value.dtype)
    return mixed.reshape(B, H, Q, C).swapaxes(1, 2).reshape(B, Q, H * C)


def linear(x, weight, dtype=None):
    """x W^T: x [..., in], weight [out, in], as checkpoints store it -> [..., out] in ``dtype``.

    dtype: None for what x and weight promote to. 16-bit numbers are summed in float32, others in ``dtype``.
    """
    common = jnp.result_type(x, weight)
    x, weight, dtype = x.astype(common), weight.astype(common), dtype or common
    if common.itemsize == 2:
        return _sixteen_bit_product(x, weight).astype(dtype)
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= FEW_ROWS:
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    columns = apart(x.reshape(rows, x.shape[-1]).T)
    return apart(jnp.dot(weight, columns, preferred_element_type=dtype)).T.reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _sixteen_bit_product(x, weight):
    """x W^T in float32, of 16-bit x [..., in] and W [out, in], whose gradients multiply 16-bit numbers too.

    A CPU has fast products of 16-bit numbers only where the result is float32 (about twice as fast as those of float32; with
    a 16-bit result they are slower), and only for two rows or more. What differentiation would do by itself
    is to multiply the float32 gradient.
    """
    product = lambda x, weight: _product(x, weight, (x.ndim - 1,), (1,))
    if x.size != x.shape[-1]:
        return product(x, weight)
    twice = lambda x, weight: product(jnp.broadcast_to(x, (2, *x.shape)), weight)[0]
    return jax.lax.platform_dependent(x, weight, cpu=twice, default=product)


def _product(x, y, of_x, of_y):
    """Sums over the axes ``of_x`` and ``of_y``, in float32."""
    return jax.lax.dot_general(x, y, ((of_x, of_y), ((), ())), preferred_element_type=jnp.float32)


def _sixteen_bit_forward(x, weight):
    return _sixteen_bit_product(x, weight), (x, weight)


def _sixteen_bit_backward(saved, gradient):
    x, weight = saved
    gradient, rows = gradient.astype(x.dtype), tuple(range(x.ndim - 1))
    return (_product(gradient, weight, (x.ndim - 1,), (0,)).astype(x.dtype),
            _product(gradient, x, rows, rows).astype(weight.dtype))


_sixteen_bit_product.defvjp(_sixteen_bit_forward, _sixteen_bit_backward)


def table_logits(hidden, rows):
    """hidden [..., D] times an output table [V, D]: [..., V], in float32 or wider: logits of 16-bit weights would tie
    otherwise."""
    return linear(hidden, rows, jnp.promote_types(jnp.result_type(hidden, rows), jnp.float32))


def scale_logits(logits, multiplier=1.0, softcap=0.0):
    """softcap * tanh(multiplier * logits / softcap); a softcap of 0 (or None) means no cap."""
    logits = logits * multiplier
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


class RMSNorm(nn.Module):
    epsilon: float

    @nn.compact
    def __call__(self, x):
        return rms_norm(x, self.param("weight", nn.initializers.ones, (x.shape[-1],)), self.epsilon)


class Linear(nn.Module):
    """`linear` with a weight [features, in] from N(0, 0.02); no bias unless asked for."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        y = linear(x, self.param("weight", nn.initializers.normal(0.02), (self.features, x.shape[-1])))
        return y + self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else y


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    width: int

    @nn.compact
    def __call__(self, x):
        gate = Linear(self.width, name="gate_proj")(x)
        up = Linear(self.width, name="up_proj")(x)
        return Linear(x.shape[-1], name="down_proj")(nn.silu(gate) * up)


class AttentionProjections(nn.Module):
    """The linear maps around attention, split into heads; optional RMS norm of each query and key head (Qwen3).

    ``keys_values`` can be called alone: the drafter gives context features keys and values but no queries.
    Rotary positions are applied to queries and keys. Heads have shape [..., heads, head_dim].
    """

    heads: int
    kv_heads: int
    head_dim: int
    width: int
    epsilon: float
    rope_theta: float
    qk_norm: bool
    use_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def setup(self):
        self.q_proj = Linear(self.heads * self.head_dim, self.use_bias)
        self.k_proj = Linear(self.kv_heads * self.head_dim, self.use_bias)
        self.v_proj = Linear(self.kv_heads * self.head_dim, self.use_bias)
        self.o_proj = Linear(self.width, self.use_bias)
        if self.qk_norm:
            self.q_norm = RMSNorm(self.epsilon)
            self.k_norm = RMSNorm(self.epsilon)

    def queries(self, x, positions):
        q = self.q_proj(x).reshape(*x.shape[:-1], self.heads, self.head_dim)
        return rotate(self.q_norm(q) if self.qk_norm else q, positions, self.rope_theta, self.rope_scaling)

    def keys_values(self, x, positions):
        k = self.k_proj(x).reshape(*x.shape[:-1], self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(*x.shape[:-1], self.kv_heads, self.head_dim)
        return rotate(self.k_norm(k) if self.qk_norm else k, positions, self.rope_theta, self.rope_scaling), v

    def output(self, mixed):
        return self.o_proj(mixed)
