"""Decoding with drafts that are known to be right: what a round would gain if every draft were accepted.

Shape letters: T draft positions, S tokens of prompt and answer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import dspark_jax as ds
from dspark_jax import decoding, generation
from dspark_jax.drafter import propose
from dspark_jax.verification import SparseDraft


def replayed_proposal(config, params, embedding, head_rows, draft_to_target, context, anchors, starts, *rest):
    """`drafter.propose` with the tokens of params["known"] int [S] in place of what it drafts, at no less work."""
    proposal = propose(config, params, embedding, head_rows, draft_to_target, context, anchors, starts, *rest)
    T = config.block_length
    known = jax.vmap(lambda start: jax.lax.dynamic_slice(params["known"], (start + 1,), (T,)))(starts)
    known, _ = jax.lax.optimization_barrier((known, proposal.tokens))  # or the drafter's work would be left out
    q = SparseDraft(known[..., None], jnp.ones((*known.shape, 1), jnp.float32))
    return dataclasses.replace(proposal, tokens=known, q=q)


_REPLAYED_ROUND = functools.partial(decoding.draft_round, propose=replayed_proposal)


def replay(target, drafter, prompt, continuation, max_new_tokens):
    """Decodes as `ds.generate` does, with every draft right: ``continuation`` is what the target says to ``prompt``."""
    known = jnp.array([*prompt, *continuation, *[0] * drafter.config.block_length], jnp.int32)
    drafter = dataclasses.replace(drafter, params=drafter.params | {"known": known})
    batch = generation.prepare(target, drafter, [prompt], max_new_tokens)
    return ds.Result.join(list(generation.parts(batch, max_new_tokens, _REPLAYED_ROUND)))
