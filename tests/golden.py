"""Reading the reference arrays in tests/goldens, and what counts as equal to them."""

import pathlib

import numpy as np

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def load(name):
    """The arrays of a file such as "dspark/heads" as a dict; int64 ids become int32."""
    with np.load(GOLDENS / f"{name}.npz") as z:
        return {k: z[k].astype(np.int32) if z[k].dtype == np.int64 else z[k] for k in z}


def close(actual, expected, tolerance=1e-5, message=""):
    """Equal to 1e-5 relative in float32; entries near zero to 1e-5 of the largest entry of their array."""
    scale = np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=message)
