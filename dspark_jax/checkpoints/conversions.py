"""From one transition to another, where both compute the same.

With score_t(a -> b) = U_t(b) + < phi_t(a), B[b] >:

    none    -> any       B = 0: the term is zero until it is trained                          exact
    vanilla -> joint     W = 0, c so large that sigmoid(c) rounds to 1: the gate is 1          exact in float32
    vanilla -> context   needs P h_t = 1 for every h_t. P h is linear in h, so h must have a channel that never changes;
                         an RMS norm leaves none, so this is refused unless the caller names one
    context -> sequential execution, the same parameters: a Selector over the whole vocabulary is a context-gated head
    no convolution -> convolution with base kernel (1, 0, ..) and W = 0: the identity           exact

Everything else has no such form, and is refused with the reason. So is a change of block layout: what a slot has learnt
to predict, its own token or the next one, is in all weights of the backbone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax import convolution, transitions
from dspark_jax.confidence import LAW_STATISTICS
from dspark_jax.drafter import Drafter, init_params

SATURATED = 32.0  # sigmoid(32) is 1 - 1.3e-14: 1 in float32
_BLOCKS = {"anchor_first": "predicts the token after its own position", "fill_in": "predicts its own position's token"}


def convert(drafter: Drafter, *, transition=None, execution=None, block_layout=None, convolution_taps=None,
            convolution_group=None, rank=256, candidates=None, constant_feature=None, seed=0) -> Drafter:
    """The same drafter in another form; None keeps what it has.

    Args:
      transition, execution, candidates: as in `DrafterConfig`.
      block_layout: "anchor_first" or "fill_in"; another one than the drafter's is refused.
      convolution_taps: taps of an identity convolution to add.
      convolution_group: channels of its groups; None: the largest of 16, 8, 4, 2, 1 that divides the width.
      rank: of a transition that takes the place of none.
      constant_feature: (channel, value) of the post-norm state, where the caller knows one that never changes.
      seed: of new parameters that the score does not depend on yet.

    Raises ValueError that says why a conversion is not possible.
    """
    config = drafter.config
    if block_layout not in (None, config.layout):
        raise ValueError(f"layout: {config.layout!r} to {block_layout!r}: a slot of this drafter "
                         f"{_BLOCKS[config.layout]}; that was trained into all of its weights and has no other form")
    if convolution_taps is not None:
        drafter = _add_convolution(drafter, convolution_taps, convolution_group)
    if transition not in (None, config.transition):
        drafter = _change_transition(drafter, transition, rank, constant_feature, seed)
    if execution is None and candidates is None:
        return drafter
    config = drafter.config
    config = dataclasses.replace(config, execution=execution or config.execution,
                                 candidates=config.candidates if candidates is None else candidates)
    return dataclasses.replace(drafter, config=config)


def to_dflash2(drafter: Drafter, rank=256, candidates=None, taps=2, group=None, seed=0) -> Drafter:
    """A DFlash drafter as a DFlash-2: identity convolution, zero successor table. It drafts what it drafted before.

    A convolution that it has already is kept. Arguments as in `convert`. Raises ValueError for a drafter with another
    transition.
    """
    return convert(drafter, transition="context", execution="lattice", candidates=candidates,
                   convolution_taps=None if drafter.config.backbone.conv_kernel_size else taps,
                   convolution_group=group, rank=rank, seed=seed)


def without_confidence(drafter: Drafter) -> Drafter:
    """The same drafter without its confidence head; it drafts what it drafted before."""
    params = {name: part for name, part in drafter.params.items() if name != "confidence"}
    config = dataclasses.replace(drafter.config, confidence=False, confidence_with_law=False, confidence_temperatures=())
    return dataclasses.replace(drafter, config=config, params=params)


def without_copying(drafter: Drafter) -> Drafter:
    """The same drafter without its copy term; it drafts what it would in a text that never repeats itself."""
    params = {name: part for name, part in drafter.params.items() if name != "copying"}
    if drafter.config.copy_length and drafter.config.confidence_with_law:  # it sees a copy that is nowhere
        law = params["confidence"]["law"]
        params["confidence"] = params["confidence"] | {"law": law | {"kernel": law["kernel"][:LAW_STATISTICS]}}
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, copy_length=0), params=params)


def _add_convolution(drafter, taps, group):
    config = drafter.config
    if config.backbone.conv_kernel_size:
        raise ValueError(f"conv_kernel_size: the drafter has a convolution of {config.backbone.conv_kernel_size} taps; "
                         "only one without can be given one")
    if taps < 1:
        raise ValueError(f"conv_kernel_size: {taps}; must be at least 1")
    width, weights = config.backbone.hidden_size, dict(drafter.params["backbone"])
    if group is None:
        group = next(size for size in (16, 8, 4, 2, 1) if width % size == 0)
    backbone = dataclasses.replace(config.backbone, conv_kernel_size=taps, conv_group_size=group)
    for i in range(backbone.num_hidden_layers):
        dtype = weights[f"layers_{i}"]["input_layernorm"]["weight"].dtype
        identity = {"base_kernel": convolution.identity_base(taps, width, dtype),
                    "kernel_projection": jnp.zeros((width, 2 * taps * width // group), dtype)}
        weights[f"layers_{i}"] = weights[f"layers_{i}"] | {"attention_conv": identity, "mlp_conv": dict(identity)}
    return dataclasses.replace(drafter, config=dataclasses.replace(config, backbone=backbone),
                               params=drafter.params | {"backbone": weights})


def _change_transition(drafter, transition, rank, constant_feature, seed):
    config = drafter.config
    old, width = config.transition, config.backbone.hidden_size
    rule = transitions.get_transition(transition)
    if old == "none":
        new = dataclasses.replace(config, transition=transition, rank=rank, execution="sequential")
        fresh = init_params(new, jax.random.key(seed))["transition"]
        fresh["successor"] = jnp.zeros_like(fresh["successor"])
    elif (old, transition) == ("vanilla", "joint"):
        new = dataclasses.replace(config, transition=transition)
        table = drafter.params["transition"]
        shapes = rule.parameter_shapes(config.vocab_size, config.draft_vocab_size, width, config.rank)
        dtype = table["successor"].dtype
        fresh = table | {"gate_kernel": jnp.zeros(shapes["gate_kernel"], dtype),
                         "gate_bias": jnp.full(shapes["gate_bias"], SATURATED, dtype)}
    elif (old, transition) == ("vanilla", "context"):
        if constant_feature is None:
            raise ValueError(
                "transition: 'vanilla' to 'context': the gate P h would have to be 1 for every state h, but it is "
                "linear in h without a bias, and the final norm leaves no channel of h constant. A DSpark head can be run "
                "as a lattice as it is: execution 'lattice'")
        channel, value = constant_feature
        if not 0 <= channel < width or not value:
            raise ValueError(f"constant_feature: {constant_feature}; must be (a channel below {width}, its "
                             "value, not 0)")
        new = dataclasses.replace(config, transition=transition)
        table = drafter.params["transition"]
        gate = jnp.zeros((width, config.rank), table["successor"].dtype).at[channel].set(1 / value)
        fresh = table | {"hidden_projection": gate}
    else:
        raise ValueError(f"transition: {old!r} to {transition!r}: there is no such form with the same scores; "
                         "possible: 'none' to any, 'vanilla' to 'joint'")
    dtype = jnp.result_type(*jax.tree.leaves(drafter.params["backbone"]))
    fresh = {name: array.astype(dtype) for name, array in fresh.items()}
    return dataclasses.replace(drafter, config=new, params=drafter.params | {"transition": fresh})
