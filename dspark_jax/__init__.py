"""Block drafters for speculative decoding in JAX: DSpark's Markov head and DFlash-2's Selector as one family."""

from dspark_jax import (
    anchors, calibration, candidates, lattice, losses, sampling, scheduling, sequential, transitions, verification)
from dspark_jax.drafter import Drafter, DrafterConfig
from dspark_jax.generation import Result, generate, stream
from dspark_jax.loading import load_drafter, load_target, save_drafter
from dspark_jax.target import Target, TargetConfig
