"""What a way of choosing verification lengths does to a server under load: recorded rounds, replayed against a clock.

A server has a number of slots. In every step each request in a slot drafts T tokens, a policy says how many of them to
verify, the pass over all b tokens takes 1 / steps_per_second[b] seconds, and each request gets the drafts that were
accepted and one token more.

What is recorded is how real requests went when all drafts were verified: the confidences c_t and how many drafts were
accepted. Verifying l of them accepts min(accepted, l). A request that got fewer tokens than in the recording goes on with
the next recorded round all the same, and with the first one again after the last, until it has as many tokens as the
recorded answer: what is kept is how sure and how right the drafter was along one answer, not which words were at stake.
Nothing is random but which answer a request replays and when it arrives, both by seed and the same for every policy.

Shape letters: P recorded answers, N rounds of all of them, T draft positions, R slots.
"""

import collections
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from dspark_jax import scheduling


@dataclasses.dataclass(frozen=True)
class Recording:
    """``confidence`` [N, T], calibrated probabilities c_t; ``accepted`` int [N], with all T drafts verified; ``starts`` int
    [P + 1], answer p has the rounds starts[p] : starts[p + 1], at least one; ``tokens`` int [P], its length."""

    confidence: np.ndarray
    accepted: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray

    def __post_init__(self):
        scheduling.check_confidence(self.confidence)
        N, T = np.shape(self.confidence)
        if np.shape(self.accepted) != (N,) or not np.all((0 <= self.accepted) & (self.accepted <= T)):
            raise ValueError(f"accepted: must be {N} counts from 0 to {T}")
        if self.starts[0] != 0 or self.starts[-1] != N or np.any(np.diff(self.starts) < 1):
            raise ValueError(f"starts: must rise from 0 to {N}, the number of rounds")
        if np.shape(self.tokens) != (len(self.starts) - 1,) or np.any(self.tokens < 1):
            raise ValueError(f"tokens: must be {len(self.starts) - 1} positive lengths, one for each answer")


def record(confidence, accepted, proposed, answer) -> Recording:
    """Rounds in order, with the answer each is of: confidence [N, T], accepted, proposed int [N], answer [N].

    A round with accepted == proposed < T ended at an accepted stop token, and gave no token beyond its drafts.
    """
    answer, (accepted, proposed) = np.asarray(answer), map(np.asarray, (accepted, proposed))
    order = np.argsort(answer, kind="stable")
    _, counts = np.unique(answer, return_counts=True)
    starts = np.concatenate([[0], np.cumsum(counts)])
    confidence, accepted, proposed = np.asarray(confidence)[order], accepted[order], proposed[order]
    stopped = (accepted == proposed) & (proposed < confidence.shape[1])
    return Recording(confidence, accepted, starts, np.add.reduceat(accepted + 1 - stopped, starts[:-1]))


# ------------------------------------------------------------------- policies

# A policy is made for one run: it may remember what it saw. policy(confidence [R, T], active bool [R]) -> lengths [R].
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]

_schedule = jax.jit(scheduling.schedule_prefixes, static_argnames=("mode",))
_capacity, _admit, _fill_up = map(jax.jit, (scheduling.capacity, scheduling.admit, scheduling.fill_up))


def _none(steps_per_second, value) -> Policy:
    return lambda confidence, active: np.zeros(len(active), np.int64)


def _static(steps_per_second, value) -> Policy:
    return lambda confidence, active: int(value) * active


def _threshold(steps_per_second, value) -> Policy:
    return lambda confidence, active: np.sum(np.cumprod(confidence >= value, axis=-1), axis=-1) * active


def _causal(steps_per_second, value) -> Policy:
    """Walks along the envelope, then fills up the step of the staircase that it ended in."""
    envelope = scheduling.monotone_envelope(steps_per_second).astype(np.float32)
    falls = np.flatnonzero(np.diff(steps_per_second[1:]) != 0) + 1  # the last number of tokens of each step
    ends = np.append(falls, len(steps_per_second) - 1)

    def lengths(confidence, active):
        return _fill_up(confidence, _schedule(confidence, envelope, mode="causal", active=active), ends, active)

    return lengths


def _lagged(steps_per_second, value) -> Policy:
    """As many drafts as two steps before would have been best. The first two steps, which have none before, are causal."""
    table, known, first = steps_per_second.astype(np.float32), collections.deque(), _causal(steps_per_second, value)

    def lengths(confidence, active):
        known.append(_capacity(confidence, table, active))
        return _admit(confidence, known.popleft(), active) if len(known) > 2 else first(confidence, active)

    return lengths


POLICIES: dict[str, Callable[[np.ndarray, float | None], Policy]] = {
    "none": _none,
    "static": _static,
    "threshold": _threshold,
    "causal": _causal,
    "lagged": _lagged,
}
_VALUES = ("static", "threshold")  # those that need a number


def parse_policy(text: str, T: int) -> tuple[str, float | None]:
    """"causal" -> ("causal", None), "static:3" -> ("static", 3.0). Raises ValueError."""
    name, separator, value = text.partition(":")
    if name not in POLICIES or (name in _VALUES) != bool(separator):
        allowed = ", ".join(f"{n}:NUMBER" if n in _VALUES else n for n in POLICIES)
        raise ValueError(f"policy: {text!r}; allowed: {allowed}")
    if not separator:
        return name, None
    most = T if name == "static" else 1
    try:
        number = float(value)
    except ValueError:
        number = np.nan
    if not 0 <= number <= most or (name == "static" and number != int(number)):
        raise ValueError(f"policy: {text!r}; the number must lie in [0, {most}]")
    return name, number


# ------------------------------------------------------------------- the clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """``tokens`` given in ``seconds``; ``rounds`` of all requests, in which ``verified`` tokens went through the target,
    one of them a round not a draft; ``request_seconds``, the sum over requests of the time they held a slot."""

    tokens: int
    seconds: float
    rounds: int
    verified: int
    request_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_user(self) -> float:
        """Of one request in its slot."""
        return self.tokens / self.request_seconds

    @property
    def concurrency(self) -> float:
        """Requests in slots, averaged over time."""
        return self.request_seconds / self.seconds

    @property
    def verification_length(self) -> float:
        """Tokens verified per request and round, the anchor included: 1 without drafts, T + 1 with all."""
        return self.verified / self.rounds

    @property
    def accepted_length(self) -> float:
        """Tokens given per request and round."""
        return self.tokens / self.rounds

    def as_dict(self) -> dict:
        names = ("tokens_per_second", "tokens_per_second_per_user", "concurrency", "verification_length",
                 "accepted_length")
        return {name: getattr(self, name) for name in names} | dataclasses.asdict(self)


def simulate(recording: Recording, steps_per_second, policy: str, *, slots: int, requests: int, rate: float | None = None,
             seed: int = 0, plain_steps_per_second=None) -> Outcome:
    """Serve requests until the last one has got its slot, so that there is no emptying of the server to be measured.

    Args:
      steps_per_second: [slots (T + 1) + 1], entry b for a step that verifies b tokens, drafting included.
      policy: as `parse_policy` takes it.
      slots: R, requests that are decoded together; the others wait.
      requests: how many; rate: how many arrive a second (Poisson). None: all are waiting from the start, so that all
        slots are always taken.
      plain_steps_per_second: [slots + 1], of steps without drafting, for the policy "none". None: steps_per_second.

    Raises: ValueError.
    """
    T = recording.confidence.shape[1]
    if slots < 1 or requests <= slots:
        raise ValueError(f"slots: {slots} for {requests} requests; must be at least 1, and more requests than slots")
    if rate is not None and not 0 < rate < np.inf:
        raise ValueError(f"rate: {rate}; must be positive and finite")
    scheduling.check_steps_per_second(steps_per_second, slots * (T + 1))
    speeds = np.asarray(steps_per_second, np.float64)[: slots * (T + 1) + 1]
    name, value = parse_policy(policy, T)
    choose = POLICIES[name](speeds, value)
    if name == "none" and plain_steps_per_second is not None:
        scheduling.check_steps_per_second(plain_steps_per_second, slots)
        speeds = np.asarray(plain_steps_per_second, np.float64)

    rng = np.random.default_rng(seed)
    answers = rng.integers(0, len(recording.tokens), requests)
    arrivals = np.zeros(requests) if rate is None else np.cumsum(rng.exponential(1 / rate, requests))
    first, rounds_of, length = recording.starts[:-1], np.diff(recording.starts), recording.tokens
    answer, at, left = np.zeros(slots, int), np.zeros(slots, int), np.zeros(slots, int)  # left: tokens to go, 0: free
    now = request_seconds = 0.0
    tokens = rounds = verified = begun = 0
    while True:
        free = np.flatnonzero(left == 0)
        if len(free) == slots:
            now = max(now, arrivals[begun])
        waiting = np.searchsorted(arrivals, now, side="right") - begun
        new = free[:waiting]
        answer[new] = answers[begun : begun + len(new)]
        at[new], left[new] = 0, length[answer[new]]
        begun += len(new)
        if begun == requests:
            break
        active = left > 0
        row = first[answer] + at % rounds_of[answer]
        chosen = np.asarray(choose(recording.confidence[row], active))
        running = np.sum(active)
        b = running + np.sum(chosen)
        seconds = 1 / speeds[b]
        given = np.minimum(np.minimum(recording.accepted[row], chosen) + 1, left)
        left -= given
        at += 1
        now += seconds
        request_seconds += running * seconds
        tokens, rounds, verified = tokens + np.sum(given), rounds + running, verified + b
    return Outcome(tokens=int(tokens), seconds=now - arrivals[0], rounds=int(rounds), verified=int(verified),
                   request_seconds=request_seconds)


# ------------------------------------------------------- curves that are given


def linear(tokens: int, step_seconds: float, knee: float) -> np.ndarray:
    """A step takes step_seconds (1 + b / knee): steps per second [tokens + 1]."""
    return 1 / (step_seconds * (1 + np.arange(tokens + 1) / knee))


def roofline(tokens: int, step_seconds: float, knee: float) -> np.ndarray:
    """A step takes step_seconds up to ``knee`` tokens, as the weights have to be read whatever their number, and grows in
    proportion beyond it: steps per second [tokens + 1]."""
    return 1 / (step_seconds * np.maximum(1, np.arange(tokens + 1) / knee))


def staircase(tokens: int, step_seconds: float, knee: float, bucket: int) -> np.ndarray:
    """`linear`, compiled for multiples of ``bucket`` tokens: steps per second [tokens + 1]."""
    sizes = np.arange(bucket, tokens + bucket, bucket)
    return scheduling.table_from_buckets(sizes, linear(sizes[-1], step_seconds, knee)[sizes], tokens)
