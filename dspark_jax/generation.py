"""Decoding: plain, or draft-verify rounds whose output law is the target's. Checks, buckets of shapes, and results.

The programs themselves are in `dspark_jax.decoding`. B batch, T draft positions, S cache length, V vocabulary.
"""

import dataclasses
import functools
import numbers
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cache as kv
from dspark_jax import decoding, sampling, verification
from dspark_jax.diagnosis import not_finite
from dspark_jax.drafter import Drafter, check_execution
from dspark_jax.scheduling import Schedule
from dspark_jax.target import Target

# Shapes are rounded up to multiples of these, so that few programs are compiled.
PROMPT_BUCKET, CACHE_BUCKET, OUTPUT_BUCKET, STOP_BUCKET = 64, 128, 64, 4


@dataclasses.dataclass(frozen=True)
class Result:
    """What was decoded, or a part of it.

    ``tokens``: new tokens per prompt. Per prompt and round: ``accepted``, ``proposed``, drafts accepted and put to
    verification (the bonus token is not counted), and ``confidence``, the raw logits of the confidence head for all T drafts
    (float32 [T] a round; an empty list without such a head).
    The first new token comes from the prompt's own pass and belongs to no round.
    """

    tokens: list[list[int]]
    accepted: list[list[int]]
    proposed: list[list[int]]
    confidence: list[list[np.ndarray]] = dataclasses.field(default_factory=list, compare=False)

    @classmethod
    def join(cls, parts: "Sequence[Result]") -> "Result":
        """Parts of `stream`, in order, of the same prompts."""
        return cls(*([sum(rows, []) for rows in zip(*(getattr(part, field.name) for part in parts))]
                     for field in dataclasses.fields(cls)))

    @property
    def accepted_length(self) -> float:
        """sum(accepted + 1) / rounds over all prompts; 1.0 for plain decoding."""
        rounds = [m + 1 for row in self.accepted for m in row]
        return sum(rounds) / len(rounds) if rounds else 1.0


def stream(target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], max_new_tokens: int = 128,
           temperature: float | Sequence[float] = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
           stop_tokens: Sequence[int] | None = None, execution: str | None = None, candidates: int | None = None,
           confidence_threshold: float = 0.0, verification: str = "token", schedule: Schedule | None = None,
           rounds: int = 1) -> Iterator[Result]:
    """`generate` in parts: the first holds each prompt's first token, each further one what ``rounds`` rounds committed.

    Nothing leaves the device within a part, so few rounds show text soon and many cost less.
    Arguments are checked at the call, not at the first part.
    """
    if not isinstance(rounds, numbers.Integral) or rounds < 1:
        raise ValueError(f"rounds: {rounds}; must be a whole number of at least 1")
    batch = prepare(target, drafter, prompts, max_new_tokens, temperature, top_k, top_p, seed, stop_tokens, execution,
                    candidates, confidence_threshold, verification, schedule)
    return parts(batch, rounds)


def generate(target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], max_new_tokens: int = 128,
             temperature: float | Sequence[float] = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
             stop_tokens: Sequence[int] | None = None, execution: str | None = None, candidates: int | None = None,
             confidence_threshold: float = 0.0, verification: str = "token",
             schedule: Schedule | None = None) -> Result:
    """Decode ``prompts`` (lists of token ids of any lengths) as one batch; the output law is the target's own.

    Args:
        drafter: None for plain decoding.
        max_new_tokens: for each prompt; 0 returns nothing.
        temperature: one number, or one for each prompt: greedy (0) and sampled rows may share a batch.
        top_k, top_p: with the temperature the target's sampling rule (`sampling.probabilities`).
        stop_tokens: ids after which a row ends; None: the target's own.
        execution: "sequential", "lattice", or None for what the drafter declares; candidates: M for the lattice.
        confidence_threshold: verify only the drafts before the first whose confidence is lower; 0 verifies all.
        verification: a name of `verification.VERIFICATION`.
        schedule: how many drafts of each prompt a round verifies (`scheduling.Schedule`); None: all, or what
            confidence_threshold says.

    Returns: `Result`; the stop token is part of the output, which never exceeds max_new_tokens.
    Raises: ValueError that names the argument and what is allowed, or what was not finite.
    """
    batch = prepare(target, drafter, prompts, max_new_tokens, temperature, top_k, top_p, seed, stop_tokens, execution,
                    candidates, confidence_threshold, verification, schedule)
    return Result.join(list(parts(batch, max(max_new_tokens, 1))))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Checked arguments."""

    options: decoding.Options
    target: Target
    drafter: Drafter | None
    prompts: list[np.ndarray]
    limit: int
    temperature: np.ndarray
    stops: np.ndarray
    schedule: dict
    seed: int


def parts(batch: Batch, rounds: int, step=None) -> Iterator[Result]:
    """What `stream` yields. step: what a round is, as in `decoding.decode`."""
    count = len(batch.prompts)
    if batch.limit == 0:
        yield Result(*([[] for _ in range(count)] for _ in range(4)))
        return
    state, request, weights = _start(batch)
    read = _Reader(batch, count)
    yield read(state)
    while not read.done:
        state = decoding.decode(batch.options, batch.target.params, weights, state, request, jnp.int32(rounds), step=step)
        yield read(state)


def _start(batch):
    """The prompts' own pass -> (`decoding.State`, `decoding.Request`, the drafter's arrays or None)."""
    options, count = batch.options, len(batch.prompts)
    lengths = np.array([len(p) for p in batch.prompts], np.int32)
    width = _round_up(lengths.max(), PROMPT_BUCKET)
    padded = np.zeros((count, width), np.int32)
    for row, prompt in enumerate(batch.prompts):
        padded[row, :len(prompt)] = prompt
    # The last round starts at the last token but one at the latest, and writes its anchor and all its drafts.
    reach = max(width, lengths.max() + batch.limit + options.block_length)
    t, S = options.target, _round_up(reach, CACHE_BUCKET)
    dtype = jnp.result_type(*jax.tree.leaves(batch.target.params))  # what the activations have
    target_cache = kv.empty_cache(t.num_hidden_layers, count, S, t.num_key_value_heads, t.head_dim, dtype)
    draft_cache, weights = (), None
    if batch.drafter is not None:
        b = options.drafter.backbone
        dtype = jnp.result_type(dtype, *jax.tree.leaves(batch.drafter.params["backbone"]))
        draft_cache = kv.empty_cache(b.num_hidden_layers, count, S, b.num_key_value_heads, b.head_dim, dtype)
        weights = batch.drafter.arrays()
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(batch.seed)))(jnp.arange(count))
    request = decoding.Request(jnp.asarray(batch.temperature), jnp.int32(batch.limit), jnp.asarray(batch.stops),
                               batch.schedule)
    state = decoding.prefill(
        options, batch.target.params, weights, jnp.asarray(padded), jnp.asarray(lengths), keys, request, target_cache,
        draft_cache, length=_round_up(batch.limit, OUTPUT_BUCKET))
    return state, request, weights


class _Reader:
    """Takes from a `decoding.State` what has been committed since the last time."""

    def __init__(self, batch, count):
        self.batch, self.produced, self.rounds, self.done = batch, np.zeros(count, int), 0, False

    def __call__(self, state):
        small = {name: getattr(state, name) for name in ("tokens", "produced", "done", "finite", "rounds", "accepted",
                                                         "proposed", "confidence")}
        new = jax.device_get(small)
        if not new["finite"].all():
            row = int(np.argmin(new["finite"]))
            said = new["tokens"][row, :new["produced"][row]]
            raise ValueError(f"prompts[{row}], after {len(said)} new tokens: "
                             f"{not_finite(self.batch.target, self.batch.drafter, [*self.batch.prompts[row], *said])}")
        begin, end = self.rounds, int(new["rounds"])
        part = Result(*([[] for _ in self.produced] for _ in range(4)))
        for row, tokens in enumerate(new["tokens"]):
            part.tokens[row].extend(tokens[self.produced[row]:new["produced"][row]].tolist())
            if new["accepted"] is None:
                continue
            accepted = new["accepted"][begin:end, row]
            ran = accepted >= 0
            part.accepted[row].extend(accepted[ran].tolist())
            part.proposed[row].extend(new["proposed"][begin:end, row][ran].tolist())
            if new["confidence"] is not None:
                part.confidence[row].extend(new["confidence"][begin:end, row][ran])
        self.produced, self.rounds, self.done = new["produced"], end, bool(new["done"].all())
        return part


def _round_up(n, multiple):
    return int(-(-int(n) // multiple) * multiple)


def prepare(target, drafter, prompts, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, seed=0, stop_tokens=None,
            execution=None, candidates=None, confidence_threshold=0.0, rule="token", schedule=None) -> Batch:
    """The checked arguments of `generate`. Raises ValueError that names the argument and what is allowed."""
    if not isinstance(max_new_tokens, numbers.Integral) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: {max_new_tokens}; must be a whole number of at least 0")
    config = target.config
    prompts = _checked_prompts(prompts, config, max_new_tokens)
    verification.get_verification(rule)
    temperature = np.asarray(temperature, np.float32)
    if temperature.shape not in ((), (len(prompts),)):
        raise ValueError(f"temperature: shape {temperature.shape}; allowed: one number, or one for each of the "
                         f"{len(prompts)} prompts")
    temperature = np.broadcast_to(temperature, len(prompts))
    for t in temperature:
        sampling.check_sampling(float(t), top_k, top_p)
    stops = sorted(set(config.stop_tokens if stop_tokens is None else stop_tokens))
    bad = next((t for t in stops if not 0 <= t < config.vocab_size), None)
    if bad is not None:
        raise ValueError(f"stop_tokens: token id {bad} is outside the vocabulary [0, {config.vocab_size})")
    padded = np.full(_round_up(max(len(stops), 1), STOP_BUCKET), -1, np.int32)
    padded[:len(stops)] = stops
    if drafter is None:
        execution = candidates = schedule = None
    else:
        execution, candidates = _checked_drafting(drafter, execution, candidates)
        schedule = _checked_schedule(drafter.config, len(prompts), confidence_threshold, schedule)
    options = decoding.Options(
        target=config, drafter=drafter.config if drafter else None, top_k=int(top_k), top_p=float(top_p),
        execution=execution, candidates=candidates, verification=rule, schedule=schedule.mode if schedule else None,
        **({"choose": drafter.choose} if drafter else {}))
    return Batch(options, target, drafter, prompts, int(max_new_tokens), temperature, padded,
                  schedule.arrays() if schedule else {}, seed)


def _checked_prompts(prompts, config, max_new_tokens):
    if not len(prompts):
        raise ValueError("prompts: empty list; give at least one prompt")
    vocab, context, checked = config.vocab_size, config.max_position_embeddings, []
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
        checked.append(np.array(prompt, np.int32))
    return checked


def _checked_drafting(drafter, execution, candidates):
    """-> (execution, M or None) as they will be run."""
    if drafter.embedding is None or drafter.head_rows is None:
        raise ValueError("drafter: was read without its target; use load_drafter(where, target)")
    c = drafter.config
    execution = c.execution if execution is None else execution
    candidates = c.usable_candidates if candidates is None else candidates
    check_execution(c, execution, candidates)
    return execution, candidates if execution == "lattice" else None


def _checked_schedule(config, count, confidence_threshold, schedule):
    """-> `Schedule` or None."""
    if not 0 <= confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold: {confidence_threshold}; must lie in [0, 1]")
    if confidence_threshold > 0:
        if not config.confidence:
            raise ValueError("confidence_threshold: this drafter has no confidence head; only 0 is allowed")
        if schedule is not None:
            raise ValueError(f"confidence_threshold: {confidence_threshold} beside a schedule; allowed: one of them")
        schedule = Schedule("threshold", threshold=confidence_threshold)
    if schedule is not None:
        schedule.check(count, config.block_length)
        if schedule.mode != "static" and not config.confidence:
            raise ValueError(f"schedule: mode {schedule.mode!r} goes by confidences, and this drafter has no confidence head")
    return schedule
