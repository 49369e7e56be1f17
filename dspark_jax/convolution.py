"""DFlash-2's grouped dynamic causal convolution over the slots of one block.

With d = W x computed once from the sublayer's input x, side s (0 before the sublayer, 1 after it), tap o and group g(c):

    conv_s(y)[t, c] = sum_o ( base[s, o, c] + d[t, s, o, g(c)] ) * y[t - o, c]        y[t - o] = 0 before the block
    x' = x + conv_1( Sublayer( conv_0( norm(x) ) ) )

J slots of a block, D width, G groups of D/G neighbouring channels.
"""

import jax.numpy as jnp


def dynamic_kernels(hidden, kernel, taps):
    """W x split up: hidden [..., J, D], kernel [D, 2 * taps * G] -> [..., J, 2, taps, G]."""
    flat = hidden @ kernel
    return flat.reshape(*flat.shape[:-1], 2, taps, -1)


def convolve(x, base, dynamic):
    """One side of the convolution: x [..., J, D], base [taps, D], dynamic [..., J, taps, G] -> [..., J, D]."""
    taps, width = base.shape
    weights = base + jnp.repeat(dynamic, width // dynamic.shape[-1], axis=-1)  # [..., J, taps, D]
    total = weights[..., 0, :] * x
    for o in range(1, taps):
        shifted = jnp.pad(x[..., :-o, :], [(0, 0)] * (x.ndim - 2) + [(o, 0), (0, 0)])[..., : x.shape[-2], :]
        total = total + weights[..., o, :] * shifted
    return total


def identity_base(taps, width, dtype=jnp.float32):
    """The base kernel [2, taps, D] that leaves its input as it is: tap 0 one, the others zero."""
    return jnp.zeros((2, taps, width), dtype).at[:, 0].set(1)
