"""Decoding: plain, and draft-verify rounds whose output law is the target's.

State of a row: the target has processed positions 0 .. start-1; the token at position ``start`` is the *anchor*, already
committed but not processed. A round drafts T tokens behind the anchor, lets the target process anchor and drafts in one
pass, keeps m of them by a verification rule and commits one more token of the target's own: the next anchor.
Rows after ``start + m`` of both caches hold rejected drafts; nothing sees them before the next round overwrites them.

B batch, T draft positions, S cache length, V vocabulary.
"""

import dataclasses
import functools
import numbers
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cache as kv
from dspark_jax import sampling, verification
from dspark_jax.drafter import Drafter, DrafterConfig, DrafterModule, check_execution, propose
from dspark_jax.target import Decoder, Target, TargetConfig

PROMPT_BUCKET, CACHE_BUCKET = 64, 128  # shapes are rounded up to these, so that few programs are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a compiled round depends on besides shapes."""

    target: TargetConfig
    drafter: DrafterConfig | None
    top_k: int
    top_p: float
    execution: str | None
    candidates: int | None
    verification: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """``anchors`` and ``starts`` int32 [B]; target and draft caches; one PRNG key a row."""

    anchors: jax.Array
    starts: jax.Array
    target_cache: tuple
    draft_cache: tuple
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """What one program call committed: per row, the new tokens; drafts accepted and proposed (None outside a round)."""

    tokens: list[list[int]]
    accepted: list[int | None]
    proposed: list[int | None]


@dataclasses.dataclass(frozen=True)
class Result:
    """``tokens``: new tokens per prompt. ``accepted``, ``proposed``: per prompt, per round; the bonus token is not counted.
    The first new token comes from the prompt's own pass and belongs to no round."""

    tokens: list[list[int]]
    accepted: list[list[int]]
    proposed: list[list[int]]

    @property
    def accepted_length(self) -> float:
        """sum(accepted + 1) / rounds over all prompts; 1.0 for plain decoding."""
        rounds = [m + 1 for row in self.accepted for m in row]
        return sum(rounds) / len(rounds) if rounds else 1.0


def _draw(options, keys, logits, temperature):
    """One token per row from the target's law: keys [B], logits [B, V]."""
    p = sampling.probabilities(logits, temperature, options.top_k, options.top_p)
    return jax.vmap(sampling.draw)(keys, p)


def _process(options, params, tokens, starts, cache):
    """The target on tokens int [B, Q] at positions starts + 0..Q-1 -> (hidden [B, Q, D], features or None, cache)."""
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    taps = options.drafter.target_layer_ids if options.drafter else ()
    hidden, tapped, cache = Decoder(options.target).apply({"params": params}, tokens, positions, cache, taps)
    return hidden, jnp.concatenate(tapped, axis=-1) if taps else None, cache


def _target_logits(options, params, hidden):
    return Decoder(options.target).apply({"params": params}, hidden, method=Decoder.logits)


def _extend_context(options, params, features, starts, cache):
    """Write the draft keys and values of newly processed positions starts + 0..Q-1."""
    if options.drafter is None:
        return cache
    positions = starts[:, None] + jnp.arange(features.shape[1])
    pairs = DrafterModule(options.drafter).apply(
        {"params": params}, features, positions, method=DrafterModule.context)
    return tuple(tuple(kv.write(old, new, starts) for old, new in zip(olds, news)) for olds, news in zip(cache, pairs))


@functools.partial(jax.jit, static_argnames=("options",), donate_argnames=("target_cache", "draft_cache"))
def _prefill(options, target, drafter, prompts, lengths, keys, temperature, target_cache, draft_cache):
    """Prompts int [B, P], right-padded, lengths int [B] -> State whose anchor is the first new token."""
    starts = jnp.zeros_like(lengths)
    hidden, features, target_cache = _process(options, target, prompts, starts, target_cache)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    draft_cache = _extend_context(options, drafter["params"] if drafter else None, features, starts, draft_cache)
    keys, now = _split(keys)
    anchors = _draw(options, now, _target_logits(options, target, last), temperature)
    return State(anchors, lengths, target_cache, draft_cache, keys)


@functools.partial(jax.jit, static_argnames=("options",), donate_argnames=("state",))
def _plain_step(options, target, state, active, temperature):
    """Process the anchor, draw the next token."""
    hidden, _, cache = _process(options, target, state.anchors[:, None], state.starts, state.target_cache)
    keys, now = _split(state.keys)
    anchors = _draw(options, now, _target_logits(options, target, hidden[:, 0]), temperature)
    return State(anchors, state.starts + active, cache, state.draft_cache, keys)


@functools.partial(jax.jit, static_argnames=("options",), donate_argnames=("state",))
def _round(options, target, drafter, state, active, temperature, threshold):
    """One draft-verify round -> (State, tokens int [B, T+1], accepted [B], proposed [B]).

    Row b commits tokens[b, :accepted[b] + 1]: the accepted drafts, then the target's own token. ``active`` int [B]:
    0 for a finished row, which stays where it is.
    """
    keys, draft_keys, verify_keys = _split(state.keys, 3)
    T = options.drafter.block_length
    proposal = propose(options.drafter, drafter["params"], drafter["embedding"], drafter["head_rows"],
                       drafter["draft_to_target"], state.draft_cache, state.anchors, state.starts, draft_keys,
                       temperature, options.execution, options.candidates, drafter["successors"])
    if proposal.confidence is None:
        proposed = jnp.full_like(state.starts, T)
    else:
        sure = jax.nn.sigmoid(proposal.confidence) >= threshold
        proposed = jnp.sum(jnp.cumprod(sure.astype(jnp.int32), axis=-1), axis=-1)
    with jax.named_scope("verify"):
        block = jnp.concatenate([state.anchors[:, None], proposal.tokens], axis=1)
        hidden, features, target_cache = _process(options, target, block, state.starts, state.target_cache)
        p = sampling.probabilities(_target_logits(options, target, hidden), temperature, options.top_k, options.top_p)
        rule = verification.get_verification(options.verification)
        accepted, following = jax.vmap(rule)(verify_keys, p, proposal.tokens, proposal.q, proposed)
    with jax.named_scope("commit"):
        draft_cache = _extend_context(options, drafter["params"], features, state.starts, state.draft_cache)
        slot = jnp.arange(T + 1)
        padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(slot == accepted[:, None], following[:, None], padded)
        anchors = jnp.where(active > 0, following, state.anchors)
        starts = state.starts + active * (accepted + 1)
    return State(anchors, starts, target_cache, draft_cache, keys), tokens, accepted, proposed


def _split(keys, parts=2):
    """[B] keys -> ``parts`` arrays of [B] keys. Each row has its own stream, whatever shares its batch."""
    return tuple(jnp.moveaxis(jax.vmap(lambda k: jax.random.split(k, parts))(keys), 1, 0))


def stream(target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], max_new_tokens: int = 128,
           temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
           stop_tokens: Sequence[int] | None = None, execution: str | None = None, candidates: int | None = None,
           confidence_threshold: float = 0.0, verification: str = "token") -> Iterator[Step]:
    """`generate`, one `Step` per round: the first holds each prompt's first token, the others what a round committed.

    Arguments are checked at the call, not at the first step.
    """
    options, stops, threshold = _check(target, drafter, prompts, max_new_tokens, temperature, top_k, top_p, stop_tokens,
                                       execution, candidates, confidence_threshold, verification)
    return _steps(options, target, drafter, prompts, max_new_tokens, temperature, seed, stops, threshold)


def generate(target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], max_new_tokens: int = 128,
             temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
             stop_tokens: Sequence[int] | None = None, execution: str | None = None, candidates: int | None = None,
             confidence_threshold: float = 0.0, verification: str = "token") -> Result:
    """Decode ``prompts`` (lists of token ids of any lengths) as one batch; the output law is the target's own.

    Args:
        drafter: None for plain decoding.
        temperature, top_k, top_p: the target's sampling rule (`sampling.probabilities`); temperature 0 is greedy.
        stop_tokens: ids after which a row ends; None: the target's own.
        execution: "sequential", "lattice", or None for what the drafter declares; candidates: M for the lattice.
        confidence_threshold: verify only the drafts before the first whose confidence is lower; 0 verifies all.
        verification: a name of `verification.VERIFICATION`.

    Returns: `Result`; the stop token is part of the output, which never exceeds max_new_tokens.
    Raises: ValueError that names the argument and what is allowed.
    """
    steps = stream(target, drafter, prompts, max_new_tokens, temperature, top_k, top_p, seed, stop_tokens, execution,
                   candidates, confidence_threshold, verification)
    result = Result([[] for _ in prompts], [[] for _ in prompts], [[] for _ in prompts])
    for step in steps:
        for row, new in enumerate(step.tokens):
            result.tokens[row] += new
            if step.accepted[row] is not None:
                result.accepted[row].append(step.accepted[row])
                result.proposed[row].append(step.proposed[row])
    return result


def _steps(options, target, drafter, prompts, max_new_tokens, temperature, seed, stops, threshold):
    count = len(prompts)
    lengths = np.array([len(p) for p in prompts], np.int32)
    width = _round_up(lengths.max(), PROMPT_BUCKET)
    padded = np.zeros((count, width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, :len(prompt)] = prompt
    # The last round starts at the last token but one at the latest, and writes its anchor and all its drafts.
    reach = max(width, lengths.max() + max_new_tokens + (options.drafter.block_length if drafter else 0))
    t, S = options.target, _round_up(reach, CACHE_BUCKET)
    dtype = jnp.result_type(*jax.tree.leaves(target.params))  # what the activations have
    target_cache = kv.empty_cache(t.num_hidden_layers, count, S, t.num_key_value_heads, t.head_dim, dtype)
    draft_cache, weights = (), None
    if drafter is not None:
        b = options.drafter.backbone
        dtype = jnp.result_type(dtype, *jax.tree.leaves(drafter.params["backbone"]))
        draft_cache = kv.empty_cache(b.num_hidden_layers, count, S, b.num_key_value_heads, b.head_dim, dtype)
        weights = drafter.arrays()
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(count))
    temperature = jnp.float32(temperature)

    state = _prefill(options, target.params, weights, jnp.asarray(padded), jnp.asarray(lengths), keys, temperature,
                     target_cache, draft_cache)
    produced = np.zeros(count, np.int64)
    done = np.zeros(count, bool)

    def commit(row, tokens):
        """Cut at a stop token and at max_new_tokens; notes whether the row is done."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        tokens = tokens[:end][:max_new_tokens - produced[row]]
        produced[row] += len(tokens)
        done[row] = tokens[-1] in stops or produced[row] >= max_new_tokens
        return tokens

    nothing = [None] * count
    yield Step([commit(row, [int(a)]) for row, a in enumerate(np.asarray(state.anchors))], nothing, nothing)
    while not done.all():
        running, active = ~done, jnp.asarray(~done, jnp.int32)
        if drafter is None:
            state = _plain_step(options, target.params, state, active, temperature)
            anchors = np.asarray(state.anchors)
            yield Step([commit(r, [int(anchors[r])]) if running[r] else [] for r in range(count)], nothing, nothing)
            continue
        state, *out = _round(options, target.params, weights, state, active, temperature, threshold)
        tokens, accepted, proposed = jax.device_get(out)
        step = Step([[] for _ in prompts], list(nothing), list(nothing))
        for r in np.flatnonzero(running):
            m, n = int(accepted[r]), int(proposed[r])
            stop = next((i + 1 for i in range(m) if int(tokens[r, i]) in stops), None)
            if stop is not None:  # a row ends at an accepted stop token: what lies behind it was never proposed
                m = n = stop
            step.accepted[r], step.proposed[r] = m, n
            step.tokens[r].extend(commit(r, tokens[r, :m + 1].tolist()))
        yield step


def _round_up(n, multiple):
    return int(-(-int(n) // multiple) * multiple)


def _check(target, drafter, prompts, max_new_tokens, temperature, top_k, top_p, stop_tokens, execution, candidates,
           confidence_threshold, rule):
    sampling.check_sampling(temperature, top_k, top_p)
    verification.get_verification(rule)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens}; must be at least 1")
    if not len(prompts):
        raise ValueError("prompts: empty list; give at least one prompt")
    vocab, context = target.config.vocab_size, target.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if not hasattr(prompt, "__len__"):
            raise ValueError(f"prompts[{i}]: {prompt!r} is not a list of token ids")
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}]: empty prompt; give at least one token")
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # arrays of ids are welcome too
        strange = [t for t in prompt if not isinstance(t, numbers.Integral)]
        if strange:
            raise ValueError(f"prompts[{i}]: {strange[0]!r} is not a token id")
        bad = next((t for t in prompt if not 0 <= t < vocab), None)
        if bad is not None:
            raise ValueError(f"prompts[{i}]: token id {bad} is outside the vocabulary [0, {vocab})")
        if len(prompt) + max_new_tokens > context:
            raise ValueError(f"prompts[{i}]: {len(prompt)} tokens and {max_new_tokens} new ones exceed the target's "
                             f"context of {context}")
    stops = frozenset(target.config.stop_tokens if stop_tokens is None else stop_tokens)
    bad = sorted(t for t in stops if not 0 <= t < vocab)
    if bad:
        raise ValueError(f"stop_tokens: token id {bad[0]} is outside the vocabulary [0, {vocab})")
    if drafter is not None:
        if drafter.embedding is None or drafter.head_rows is None:
            raise ValueError("drafter: was read without its target; use load_drafter(where, target)")
        c = drafter.config
        execution = c.execution if execution is None else execution
        candidates = min(c.candidates, c.draft_vocab_size) if candidates is None else candidates
        check_execution(c, execution, candidates)
        if not 0 <= confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold: {confidence_threshold}; must lie in [0, 1]")
        if confidence_threshold > 0 and not c.confidence:
            raise ValueError("confidence_threshold: this drafter has no confidence head; only 0 is allowed")
    options = Options(target=target.config, drafter=drafter.config if drafter else None, top_k=top_k, top_p=float(top_p),
                      execution=execution if drafter else None,
                      candidates=candidates if drafter and execution == "lattice" else None, verification=rule)
    return options, stops, jnp.float32(confidence_threshold)
