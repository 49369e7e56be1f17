"""Draft logits: a multiplier, then a soft cap."""

import pytest

from dspark_jax.layers import scale_logits
from golden import close, load

Z = load("dflash/logits")
M, C = float(Z["output_multiplier"]), float(Z["final_logit_softcapping"])
SETTINGS = {
    "logits_plain": (1.0, 0.0),
    "logits_multiplier": (M, 0.0),
    "logits_softcap": (1.0, C),
    "logits_both": (M, C),
    # Which of two places in a configuration counts is settled before these numbers are used.
    "logits_toplevel_both": (M, C),
    "logits_dflash_config_wins": (M, C),
    "logits_softcap_zero": (M, 0.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_golden(name):
    plain = Z["hidden"] @ Z["lm_head"].T
    close(scale_logits(plain, *SETTINGS[name]), Z[name])


def test_every_array_is_covered():
    assert set(SETTINGS) == {k for k in Z if k.startswith("logits_")}
