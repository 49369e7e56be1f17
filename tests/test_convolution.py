import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dspark_jax.convolution import convolve, dynamic_kernels, identity_base
from golden import close, load


def test_golden():
    z = load("dflash/conv")
    taps, base = int(z["kernel_size"]), z["base_kernel"]
    dynamic = dynamic_kernels(z["hidden"], z["kernel_projection"].T, taps)
    close(dynamic, z["dynamic"])
    close(dynamic[:, :, 1], z["dynamic_post"])
    assert dynamic.shape[-1] == base.shape[-1] // int(z["group_size"])
    close(convolve(z["hidden"], base[0], dynamic[:, :, 0]), z["prepared"])
    close(convolve(z["sublayer_output"], base[1], dynamic[:, :, 1]), z["finished"])


def test_golden_identity():
    z = load("dflash/conv")
    taps, base = int(z["kernel_size"]), z["identity_base_kernel"]
    np.testing.assert_array_equal(identity_base(taps, base.shape[-1]), base)
    dynamic = dynamic_kernels(z["hidden"], z["identity_kernel_projection"].T, taps)
    np.testing.assert_array_equal(dynamic[:, :, 1], z["identity_dynamic_post"])
    np.testing.assert_array_equal(convolve(z["hidden"], base[0], dynamic[:, :, 0]), z["identity_prepared"])
    np.testing.assert_array_equal(convolve(z["sublayer_output"], base[1], dynamic[:, :, 1]), z["identity_finished"])
    np.testing.assert_array_equal(z["identity_prepared"], z["hidden"])


def random_inputs(J, taps, D=6, G=3, lead=(2,)):
    rng = np.random.default_rng(J)
    return rng.normal(size=(*lead, J, D)), rng.normal(size=(2, taps, D)), rng.normal(size=(D, 2 * taps * G))


@pytest.mark.parametrize("J, taps", [(5, 1), (5, 2), (4, 3), (2, 4), (1, 2)])
def test_against_loops(J, taps):
    """More taps than slots included: what lies before the block is zero."""
    D, G = 6, 3
    x, base, kernel = (a.astype(np.float32) for a in random_inputs(J, taps, D, G))
    dynamic = dynamic_kernels(x, kernel, taps)
    assert dynamic.shape == (2, J, 2, taps, G)
    for side in (0, 1):
        expected = np.zeros((2, J, D))
        for b, t, c, o in np.ndindex(2, J, D, taps):
            if t - o >= 0:
                d = sum(x[b, t, i] * kernel[i, side * taps * G + o * G + c // (D // G)] for i in range(D))
                expected[b, t, c] += (base[side, o, c] + d) * x[b, t - o, c]
        close(convolve(x, base[side], dynamic[:, :, side]), expected)


def test_gradients_to_second_order():
    with jax.enable_x64(True):
        x, base, kernel = (jnp.asarray(a) / 2 for a in random_inputs(3, 2, 4, 2, lead=()))

        def f(x, base, kernel):
            dynamic = dynamic_kernels(x, kernel, 2)
            inner = convolve(x, base[0], dynamic[..., 0, :, :])
            return convolve(jnp.tanh(inner), base[1], dynamic[..., 1, :, :])

        check_grads(jax.jit(f), (x, base, kernel), order=2, modes=("fwd", "rev"))
