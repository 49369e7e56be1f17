"""The compiled programs of decoding: one pass over the prompts, and rounds in one `lax.while_loop`.

State of a row: the target has processed positions 0 .. start-1; the token at position ``start`` is the *anchor*, already
committed but not processed. A round drafts T tokens behind the anchor, lets the target process anchor and drafts in one
pass, keeps m of them by a verification rule and commits one more token of the target's own: the next anchor.
Plain decoding is the round without drafts. Rows of both caches behind ``start + m`` hold rejected drafts; nothing sees
them before the next round overwrites them.

What is compiled depends on `Options` and shapes alone: never on prompts, accepted lengths, temperatures or stop tokens.

B batch, T draft positions (0 for plain decoding), Q = T+1 tokens a row verifies at most, N tokens a round verifies, S
cache length, L longest output, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from dspark_jax import cache as kv
from dspark_jax import sampling, scheduling, verification
from dspark_jax.candidates import Choice, top_candidates
from dspark_jax.drafter import DrafterConfig, DrafterModule, confidence_probabilities, propose
from dspark_jax.target import Decoder, Ragged, TargetConfig

BUCKETS = 4  # steps, at most, from the smallest to the largest size that a scheduled round is compiled for
# Tokens that products work on at a time: 26 tokens of SmolLM2 take a third longer than 32 on a CPU
# (benchmarks/RESULTS.md), and TPU rows come in eights too.
TILE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a compiled program depends on besides shapes.

    ``schedule``: the `scheduling` mode, None to verify all drafts. ``choose``: what finds the candidates of lattice
    execution, a function of `dspark_jax.candidates`.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    top_k: int
    top_p: float
    execution: str | None
    candidates: int | None
    verification: str
    schedule: str | None
    choose: Choice = top_candidates

    @property
    def block_length(self):
        """T."""
        return self.drafter.block_length if self.drafter else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of a batch: ``temperature`` float32 [B], ``limit`` int32 [] new tokens, ``stops`` int32 [any], padded
    with -1, ``schedule``: the arrays that the mode of the options needs."""

    temperature: jax.Array
    limit: jax.Array
    stops: jax.Array
    schedule: dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """``anchors``, ``starts`` int32 [B]; both caches; one PRNG key a row; and what was said so far:

    ``tokens`` int32 [B, L+T] with ``produced`` int32 [B] of them committed; ``done`` and ``finite`` bool [B]; of round r <
    ``rounds`` int32 []: ``accepted`` and ``proposed`` int32 [L, B], -1 where the row was done, and the raw ``confidence``
    logits float32 [L, B, T]; all three None where nothing is drafted, the last without a confidence head. ``earlier``
    float32 [2, B, T]: the confidences of the last two rounds, the older one first; 1 before there were any. ``text`` int32
    [B, S]: prompt and answer up to the anchor at ``starts``, and anything behind; None where the drafter copies nothing.
    """

    anchors: jax.Array
    starts: jax.Array
    target_cache: tuple
    draft_cache: tuple
    keys: jax.Array
    tokens: jax.Array
    produced: jax.Array
    done: jax.Array
    finite: jax.Array
    rounds: jax.Array
    accepted: jax.Array | None
    proposed: jax.Array | None
    confidence: jax.Array | None
    earlier: jax.Array | None
    text: jax.Array | None


def _split(keys, parts):
    """[B] keys -> ``parts`` arrays of [B] keys. Each row has its own stream, whatever shares its batch."""
    return tuple(jnp.moveaxis(jax.vmap(lambda k: jax.random.split(k, parts))(keys), 1, 0))


def process(options, params, tokens, positions, cache, ragged=None):
    """The target on ``tokens`` -> (final-normed hidden [..., D], features [..., taps * D] or None, cache)."""
    taps = options.drafter.target_layer_ids if options.drafter else ()
    with jax.named_scope("verify"):
        hidden, tapped, cache = Decoder(options.target).apply({"params": params}, tokens, positions, cache, taps, ragged)
    return hidden, jnp.concatenate(tapped, axis=-1) if taps else None, cache


def logits_of(options, params, hidden):
    """The target's logits: final-normed hidden [..., D] -> [..., V]."""
    with jax.named_scope("verify_head"):
        return Decoder(options.target).apply({"params": params}, hidden, method=Decoder.logits)


def draw(options, keys, logits, temperature):
    """One token per row from the target's law: keys [B], logits [B, V]."""
    return jax.vmap(sampling.draw)(keys, sampling.probabilities(logits, temperature, options.top_k, options.top_p))


def _finite(x):
    """bool [B]: no NaN and no infinity in row b of x [B, ...]."""
    return jnp.all(jnp.isfinite(x), axis=range(1, x.ndim))


def extend_context(options, weights, features, starts, cache):
    """Write the draft keys and values of newly processed positions starts + 0..Q-1: features [B, Q, taps * D]."""
    positions = starts[:, None] + jnp.arange(features.shape[1])
    with jax.named_scope("commit"):
        pairs = DrafterModule(options.drafter).apply(
            {"params": weights["params"]}, features, positions, method=DrafterModule.context)
        return tuple(tuple(kv.write(old, new, starts) for old, new in zip(olds, news)) for olds, news in zip(cache, pairs))


def _put(rows, new, at):
    """rows [B, L] with new [B, Q] from at[b] on."""
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(rows, new, at)


def _commit(state, request, active, new, count):
    """Append new[b, :count[b]] (int [B, Q]) to the rows that are ``active``, up to a stop token or the limit.

    -> (fields of the new State, count [B] up to the stop token)."""
    slot = jnp.arange(new.shape[1])
    stop = jnp.any(new[..., None] == request.stops, axis=-1) & (slot < count[:, None])
    stopped = jnp.any(stop, axis=-1)
    count = jnp.where(stopped, jnp.argmax(stop, axis=-1) + 1, count)
    # The whole of ``new`` is written: what lies behind ``count`` is overwritten by the next round, or never read.
    put = _put(state.tokens, new, state.produced)
    produced = jnp.minimum(state.produced + count, request.limit)
    return {"tokens": jnp.where(active[:, None], put, state.tokens),
            "produced": jnp.where(active, produced, state.produced),
            "done": state.done | (active & (stopped | (produced >= request.limit)))}, count


@functools.partial(jax.jit, static_argnames=("options", "length"), donate_argnames=("target_cache", "draft_cache"))
def prefill(options, target, weights, prompts, lengths, keys, request, target_cache, draft_cache, length):
    """Prompts int [B, P], right-padded, lengths int [B] -> `State` whose anchor is the first new token.

    target, weights: the arrays of target and drafter; length: L.
    """
    B, P = prompts.shape
    T = options.block_length
    positions = jnp.broadcast_to(jnp.arange(P), (B, P))
    hidden, features, target_cache = process(options, target, prompts, positions, target_cache)
    if options.drafter:
        draft_cache = extend_context(options, weights, features, jnp.zeros_like(lengths), draft_cache)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    logits = logits_of(options, target, last)
    keys, now = _split(keys, 2)
    anchors = draw(options, now, logits, request.temperature)
    record = jnp.full((length, B), -1, jnp.int32) if T else None
    sure = jnp.zeros((length, B, T), jnp.float32) if T and options.drafter.confidence else None
    nothing = jnp.zeros(B, jnp.int32)
    text = None
    if T and options.drafter.copy_length:
        text = jnp.pad(prompts, ((0, 0), (0, target_cache[0][0].shape[2] - P)))
        text = _put(text, anchors[:, None], lengths)
    state = State(anchors, lengths, target_cache, draft_cache, keys, jnp.zeros((B, length + T), jnp.int32), nothing,
                  jnp.zeros(B, bool), _finite(logits), jnp.int32(0), record, record, sure,
                  jnp.ones((2, B, T), jnp.float32) if options.schedule == "lagged" else None, text)
    first, _ = _commit(state, request, ~state.done, anchors[:, None], jnp.ones(B, jnp.int32))
    return dataclasses.replace(state, **first)


@functools.partial(jax.jit, static_argnames=("options", "step"), donate_argnames=("state",))
def decode(options, target, weights, state, request, rounds, step=None):
    """At most ``rounds`` (int []) further rounds, fewer where all rows are done or one is not finite -> `State`.

    step: what a round is, a function with the signature of `draft_round`; None: `plain_round` or `draft_round`.
    """
    step = step or (draft_round if options.drafter else plain_round)
    end = state.rounds + rounds

    def going_on(state):
        return (state.rounds < end) & ~jnp.all(state.done) & jnp.all(state.finite)

    return jax.lax.while_loop(going_on, lambda state: step(options, target, weights, state, request), state)


def plain_round(options, target, weights, state, request):
    """Process the anchor, draw the next token."""
    active = ~state.done
    hidden, _, cache = process(options, target, state.anchors[:, None], state.starts[:, None], state.target_cache)
    logits = logits_of(options, target, hidden[:, 0])
    keys, now = _split(state.keys, 2)
    anchors = draw(options, now, logits, request.temperature)
    committed, _ = _commit(state, request, active, anchors[:, None], jnp.ones_like(anchors))
    return dataclasses.replace(
        state, anchors=anchors, starts=state.starts + active, target_cache=cache, keys=keys,
        finite=state.finite & _finite(logits), rounds=state.rounds + 1, **committed)


def draft_round(options, target, weights, state, request, propose=propose):
    """Draft, verify, commit: one round of all rows. ``propose`` has the signature of `drafter.propose`."""
    active = ~state.done
    keys, draft_keys, verify_keys = _split(state.keys, 3)
    T = options.block_length
    proposal = propose(options.drafter, weights["params"], weights["embedding"], weights["head_rows"],
                       weights["draft_to_target"], state.draft_cache, state.anchors, state.starts, draft_keys,
                       request.temperature, options.execution, options.candidates, weights["successors"], options.choose,
                       state.text)
    sure = None if proposal.confidence is None else confidence_probabilities(options.drafter, proposal.confidence)
    proposed = _lengths(options, sure, state.earlier, request, active)
    block = jnp.concatenate([state.anchors[:, None], proposal.tokens], axis=1)
    p, finite, features, target_cache = _verify(
        options, target, block, state.starts, state.target_cache, proposed, active, request.temperature)
    with jax.named_scope("rule"):
        rule = verification.get_verification(options.verification)
        accepted, following = jax.vmap(rule)(verify_keys, p, proposal.tokens, proposal.q, proposed)
    draft_cache = extend_context(options, weights, features, state.starts, state.draft_cache)
    slot = jnp.arange(T + 1)
    new = jnp.where(slot == accepted[:, None], following[:, None], jnp.pad(proposal.tokens, ((0, 0), (0, 1))))
    committed, count = _commit(state, request, active, new, accepted + 1)
    # A row ends at an accepted stop token: what lies behind it was never proposed.
    ended = count <= accepted

    def record(table, values):
        return table.at[state.rounds].set(jnp.where(active, values, -1))

    return State(
        anchors=jnp.where(active, following, state.anchors), starts=state.starts + active * (accepted + 1),
        target_cache=target_cache, draft_cache=draft_cache, keys=keys, **committed,
        finite=state.finite & finite & proposal.finite, rounds=state.rounds + 1,
        accepted=record(state.accepted, jnp.where(ended, count, accepted)),
        proposed=record(state.proposed, jnp.where(ended, count, proposed)),
        confidence=None if sure is None else state.confidence.at[state.rounds].set(proposal.confidence),
        earlier=None if state.earlier is None else jnp.stack([state.earlier[1], sure]),
        text=None if state.text is None else _put(state.text, new, state.starts + 1))


def _lengths(options, sure, earlier, request, active):
    """How many drafts of each row are put to verification: int32 [B]. sure: probabilities [B, T] or None."""
    shape = (*active.shape, options.block_length)
    if options.schedule is None:
        return jnp.full(shape[:1], options.block_length, jnp.int32)
    sure = jnp.ones(shape, jnp.float32) if sure is None else sure
    given = request.schedule | ({} if earlier is None else {"earlier": earlier[0]})
    lengths = scheduling.get_mode(options.schedule)(sure, active, **given)
    if options.schedule == "causal":
        lengths = scheduling.fill_up(sure, lengths, jnp.array(buckets(*shape)), active)
    return lengths


def _verify(options, params, block, starts, cache, proposed, active, temperature):
    """The target's laws after the anchor and after each draft that is put to verification.

    block int [B, Q], proposed int [B] -> p float32 [B, Q, V], finite bool [B], features [B, Q, taps * D], cache; what lies
    behind slot proposed[b] is arbitrary. Where a schedule decides, the tokens of all active rows are put side by side and
    the smallest compiled size that holds them is run.
    """
    B, Q = block.shape
    positions = starts[:, None] + jnp.arange(Q)

    def laws(hidden, temperature):
        logits = logits_of(options, params, hidden)
        return sampling.probabilities(logits, temperature, options.top_k, options.top_p), jnp.all(jnp.isfinite(logits), -1)

    def all_drafts(cache):
        hidden, features, cache = process(options, params, block, positions, cache)
        p, finite = laws(hidden, temperature[:, None])
        return p, jnp.all(finite, axis=-1), features, cache

    def some_drafts(N, cache):
        places = Ragged.of(lengths, Q, N)
        at = places.rows, places.slots
        hidden, features, cache = process(options, params, block[at], positions[at], cache, places)
        p, finite = laws(hidden, temperature[places.rows])
        return p[places.index], jnp.all(finite[places.index], axis=-1), features[places.index], cache

    if options.schedule is None:
        return all_drafts(cache)
    lengths = jnp.where(active, proposed + 1, 0)
    sizes = buckets(B, Q - 1)
    smallest = jnp.searchsorted(jnp.array(sizes), jnp.sum(lengths))
    branches = [functools.partial(some_drafts, N) for N in sizes[:-1]] + [all_drafts]
    return jax.lax.switch(smallest, branches, cache)


def buckets(B, T):
    """Numbers of tokens, from B (no drafts) to B (T+1), that a scheduled round is compiled for: whole tiles between."""
    steps = (B + B * T * i / BUCKETS for i in range(1, BUCKETS))
    return sorted({B, *(min(math.ceil(n / TILE) * TILE, B * (T + 1)) for n in steps), B * (T + 1)})
