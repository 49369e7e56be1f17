"""How many drafts of each request to verify: the prefix lengths that promise the most tokens per second.

c_rt is the (calibrated) chance that draft t of request r is accepted, given that those before it were, and
a_rt = c_r0 ... c_rt the chance that it survives. A verify pass over b tokens runs steps_per_second[b] times a second.
Where request r is verified with its first l_r drafts, the pass is expected to yield, per second,

    objective = tau * steps_per_second[b]        tau = sum_r (1 + sum_{t < l_r} a_rt)        b = sum_r (1 + l_r)

since each request gets one token of the target's own whatever happens to its drafts. For a fixed b the largest a_rt
are the best choice, and as a_rt never grows with t, they are prefixes. So all candidates (r, t) are ranked by a_rt,
and what is left is K, how many of them to admit.

Which rules keep the target's law: those that settle whether (r, t) is verified by what is known before draft x_rt is
drawn, as a draft that is judged only if it looks good is no longer a draw from q. c_rt itself is known by then, c_r(t+1)
depends on x_rt already. Candidates (r, s > t) rank behind (r, t), and other requests know nothing of x_rt. So a K that
is fixed beforehand is safe ("lagged"), and so is walking down the ranking and stopping for good at the first candidate
that does not pay ("causal"), but not the K with the largest objective of all, which looks at later drafts.

A mode is a function `rule(confidence, active, *, ...)` -> lengths, with what else it needs as keyword arguments, and an
entry in `MODES`.

Shape letters: R requests, T draft positions, N = R T candidates. All but `table_from_buckets` and `monotone_envelope`
can be traced by jax.jit and jax.vmap.
"""

import dataclasses
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def survival(confidence: jax.Array) -> jax.Array:
    """a_t = c_0 ... c_t along the last axis: probabilities [..., T] -> [..., T], never growing, not even by rounding."""
    return jax.lax.cummin(jnp.cumprod(confidence, axis=-1), axis=confidence.ndim - 1)


def objective(
    confidence: jax.Array, lengths: jax.Array, steps_per_second: jax.Array, active: jax.Array | None = None
) -> jax.Array:
    """Expected tokens per second: confidence [R, T], lengths int [R], steps_per_second [> b], active bool [R] -> []."""
    R, T = confidence.shape
    active = jnp.ones(R, bool) if active is None else active
    verified = active[:, None] & (jnp.arange(T) < lengths[:, None])
    requests = jnp.sum(active)
    expected = requests + jnp.sum(survival(confidence), where=verified)
    return expected * steps_per_second[requests + jnp.sum(verified)]


def _candidates(confidence, active):
    """All (r, t) by falling a_rt: (a [N], r int [N]). Equal ones by rising t, then rising r; inactive rows have a = 0."""
    a = survival(confidence)
    if active is not None:
        a = jnp.where(active[:, None], a, 0)
    a = a.T.reshape(-1)
    order = jnp.argsort(-a, stable=True)
    return a[order], order % confidence.shape[0]


def _objectives(confidence, steps_per_second, active):
    """The objective with the first K candidates, K = 0..N: [N + 1]. -inf where a candidate can not be accepted."""
    a, _ = _candidates(confidence, active)
    requests = confidence.shape[0] if active is None else jnp.sum(active)
    expected = requests + jnp.pad(jnp.cumsum(a), (1, 0))
    theta = expected * steps_per_second[requests + jnp.arange(a.size + 1)]
    return jnp.where(jnp.pad(a > 0, (1, 0), constant_values=True), theta, -jnp.inf)


def admit(confidence: jax.Array, K: jax.Array | int, active: jax.Array | None = None) -> jax.Array:
    """The lengths that make up the K best candidates.

    Equal candidates: the earlier position first, then the lower row. Those with a_rt = 0 are never admitted.

    confidence [R, T], K int [], active bool [R] or None for all -> int32 [R], 0 in inactive rows.
    """
    a, rows = _candidates(confidence, active)
    admitted = (jnp.arange(a.size) < K) & (a > 0)
    return jnp.zeros(confidence.shape[0], jnp.int32).at[rows].add(admitted.astype(jnp.int32))


def capacity(confidence: jax.Array, steps_per_second: jax.Array, active: jax.Array | None = None) -> jax.Array:
    """The K with the largest objective, the smallest one where several have it: int32 [].

    It has looked at every draft of the round, so it must not decide about that round; see `lagged_lengths`.

    confidence [R, T], steps_per_second [R (T + 1) + 1], active bool [R] or None for all.
    """
    return jnp.argmax(_objectives(confidence, steps_per_second, active)).astype(jnp.int32)


def causal_lengths(confidence: jax.Array, active: jax.Array | None, *, steps_per_second: jax.Array) -> jax.Array:
    """Algorithm 1 of the DSpark paper: down the ranking while the objective grows, and no further.

    The largest objective of all is found where it has one peak along the ranking, as with a `monotone_envelope`.
    """
    theta = _objectives(confidence, steps_per_second, active)
    rises = (theta[1:] > theta[:-1]).astype(jnp.int32)
    return admit(confidence, jnp.sum(jnp.cumprod(rises)), active)


def fill_up(
    confidence: jax.Array, lengths: jax.Array, sizes: jax.Array, active: jax.Array | None = None
) -> jax.Array:
    """Causal lengths made longer until the pass has a size that it is compiled for, which costs nothing: int32 [R].

    That keeps the law too: candidate j is then verified iff the walk got past the largest size that is at most j, of
    which the walk decides without looking behind j.

    lengths: of `causal_lengths`; sizes: numbers of tokens, rising, the last at least R (T + 1).
    """
    requests = confidence.shape[0] if active is None else jnp.sum(active)
    tokens = sizes[jnp.searchsorted(sizes, requests + jnp.sum(lengths))]
    return admit(confidence, tokens - requests, active)


def lagged_lengths(
    confidence: jax.Array, active: jax.Array | None, *, steps_per_second: jax.Array, earlier: jax.Array
) -> jax.Array:
    """The best candidates of this round, as many as would have been best in an earlier one.

    earlier [R, T]: the confidences of a round before (the paper: two before, so that the size of a pass is known while
    the last one is still running). Any curve will do, steps and all.
    """
    return admit(confidence, capacity(earlier, steps_per_second, active), active)


def static_lengths(confidence: jax.Array, active: jax.Array | None, *, length: jax.Array | int) -> jax.Array:
    """The same length for every active row."""
    R, T = confidence.shape
    lengths = jnp.full(R, jnp.minimum(length, T), jnp.int32)
    return lengths if active is None else jnp.where(active, lengths, 0)


def threshold_lengths(confidence: jax.Array, active: jax.Array | None, *, threshold: jax.Array | float) -> jax.Array:
    """The drafts before the first one with c_rt < threshold."""
    sure = confidence >= threshold
    if active is not None:
        sure &= active[:, None]
    return jnp.sum(jnp.cumprod(sure.astype(jnp.int32), axis=-1), axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What `generate` needs of a mode: its name and its options, but for ``earlier``, which decoding keeps itself.

    ``steps_per_second`` [R (T + 1) + 1] of passes over so many tokens, for "causal" and "lagged"; ``length`` for "static";
    ``threshold`` for "threshold". `check` raises ValueError where something is missing, or not as `schedule_prefixes`
    would take it.
    """

    mode: str
    steps_per_second: np.ndarray | None = None
    length: int | None = None
    threshold: float | None = None

    def check(self, R: int, T: int) -> None:
        """For R requests of T drafts."""
        given = {name: value for name in ("length", "threshold") if (value := getattr(self, name)) is not None}
        if self.mode == "lagged":
            given["earlier"] = np.ones((R, T))
        schedule_prefixes(np.ones((R, T)), self.steps_per_second, self.mode, **given)

    def arrays(self) -> dict[str, jax.Array]:
        """The options as arrays."""
        given = {"steps_per_second": (self.steps_per_second, jnp.float32), "length": (self.length, jnp.int32),
                 "threshold": (self.threshold, jnp.float32)}
        return {name: jnp.asarray(value, dtype) for name, (value, dtype) in given.items() if value is not None}


MODES: dict[str, Callable] = {
    "causal": causal_lengths,
    "lagged": lagged_lengths,
    "static": static_lengths,
    "threshold": threshold_lengths,
}


def get_mode(name: str) -> Callable:
    """`MODES[name]`; raises ValueError that lists the known names."""
    if name not in MODES:
        raise ValueError(f"mode: unknown name {name!r}; allowed: {', '.join(MODES)}")
    return MODES[name]


def schedule_prefixes(
    confidence: jax.Array,
    steps_per_second: jax.Array | None = None,
    mode: str = "causal",
    *,
    active: jax.Array | None = None,
    **options,
) -> jax.Array:
    """How many drafts of each request to verify this round, under a mode that keeps the target's law.

    Args:
      confidence: [R, T], calibrated probabilities c_rt (not logits).
      steps_per_second: [R (T + 1) + 1] or more; entry b is for a pass over b tokens, entry 0 is not read. None for
        modes that have no use for it.
      mode: a name of `MODES`.
      active: bool [R]; the other rows get length 0, cost no token and promise none. None: all rows.
      options: what the mode needs: ``earlier`` [R, T] for "lagged", ``length`` for "static", ``threshold`` for
        "threshold".

    Returns: int32 [R].
    Raises: ValueError that names the argument and what is allowed. Values of traced arrays are not looked at.
    """
    rule = get_mode(mode)
    check_confidence(confidence)
    R, T = confidence.shape
    if active is not None and np.shape(active) != (R,):
        raise ValueError(f"active: shape {np.shape(active)}; must be {(R,)}, one for each row of confidence")
    if steps_per_second is not None:
        check_steps_per_second(steps_per_second, R * (T + 1))
        options["steps_per_second"] = jnp.asarray(steps_per_second)
    _check_options(mode, rule, options)
    if "earlier" in options:
        check_confidence(options["earlier"], "earlier")
        if np.shape(options["earlier"]) != (R, T):
            raise ValueError(f"earlier: shape {np.shape(options['earlier'])}; must be that of confidence, {(R, T)}")
        options["earlier"] = jnp.asarray(options["earlier"])
    for name, most, kind in (("length", T, "an integer"), ("threshold", 1, "a number")):
        value = options.get(name, 0)
        if _is_known(value) and not (0 <= value <= most and (kind == "a number" or value == int(value))):
            raise ValueError(f"{name}: {value}; must be {kind} in [0, {most}]")
    return rule(jnp.asarray(confidence), None if active is None else jnp.asarray(active), **options)


def _check_options(mode, rule, options):
    needs = [p.name for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in needs:
        if options.get(name) is None:
            raise ValueError(f"{name}: missing; the mode {mode!r} needs it")
    if "steps_per_second" not in needs:
        options.pop("steps_per_second", None)
    for name in options:
        if name not in needs:
            raise ValueError(f"{name}: the mode {mode!r} has no use for it; it takes {', '.join(needs)}")


def _is_known(x):
    return not isinstance(x, jax.core.Tracer)


def check_confidence(confidence, name: str = "confidence") -> None:
    """Raises ValueError for anything but [R, T] probabilities, R and T at least 1."""
    if np.ndim(confidence) != 2 or 0 in np.shape(confidence):
        raise ValueError(f"{name}: shape {np.shape(confidence)}; must be [requests, draft positions], none of them 0")
    if _is_known(confidence):
        values = np.asarray(confidence)
        bad = values[~((values >= 0) & (values <= 1))]
        if bad.size:
            raise ValueError(f"{name}: {bad[0]}; must be probabilities, in [0, 1]")


def check_steps_per_second(steps_per_second, tokens: int) -> None:
    """Raises ValueError for anything but positive numbers for 1 to ``tokens`` tokens, behind an entry 0 of any value."""
    shape = np.shape(steps_per_second)
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"steps_per_second: shape {shape}; must be one number for each count of tokens, 0 included")
    if shape[0] < tokens + 1:
        raise ValueError(f"steps_per_second: {shape[0]} entries, for at most {shape[0] - 1} tokens; a round may take "
                         f"{tokens}, so at least {tokens + 1} are needed")
    if _is_known(steps_per_second):
        values = np.asarray(steps_per_second)[1:]
        bad = np.flatnonzero(~((values > 0) & np.isfinite(values)))
        if bad.size:
            raise ValueError(f"steps_per_second: {values[bad[0]]} for {bad[0] + 1} tokens; must be positive and finite")


def table_from_buckets(buckets, steps_per_second, tokens: int) -> np.ndarray:
    """What a program that is compiled for a few sizes does with any number of tokens: the speed of the next size up.

    buckets: rising sizes in tokens, the last at least ``tokens``; steps_per_second: the speed of each.
    Returns: float64 [tokens + 1]; entry 0 is that of the smallest bucket.
    Raises: ValueError.
    """
    buckets = np.asarray(buckets)
    speeds = np.asarray(steps_per_second, np.float64)
    if buckets.ndim != 1 or buckets.shape != speeds.shape or not buckets.size:
        raise ValueError(f"buckets: shape {buckets.shape}, with {speeds.shape} speeds; must be as many, at least one")
    if buckets[0] < 1 or np.any(np.diff(buckets) <= 0):
        raise ValueError(f"buckets: {buckets.tolist()}; must be strictly increasing, from 1 on")
    if buckets[-1] < tokens:
        raise ValueError(f"buckets: the largest has {buckets[-1]} tokens; must be at least {tokens}")
    table = speeds[np.searchsorted(buckets, np.arange(tokens + 1))]
    check_steps_per_second(table, tokens)
    return table


def monotone_envelope(steps_per_second) -> np.ndarray:
    """The curve that the causal mode should walk along where compiled sizes make the real one a staircase.

    Within a step of the staircase drafts are free, and the first one beyond it pays for the whole next step: the walk
    would stop there although the step might be worth its price when filled. So the price is spread: with
    seconds s_b = 1 / steps_per_second[b], the envelope's seconds are the largest function below s that is convex and
    does not fall, which is exact at the ends of the steps that are worth going to, and cheaper between. Expected tokens
    are concave along the ranking, so their quotient has a single peak, and the walk finds it.

    The law of the output does not depend on the curve, as long as the curve does not depend on the drafts. What is lost
    on a pass that ends within a step is the price of being causal; "lagged" needs no envelope.

    steps_per_second: [n], entry b for b tokens; entry 0 is not read. Returns: float64 [n], nowhere below the input and
    never rising (but for rounding); entry 0 repeats entry 1. Not for tracing. Raises: ValueError.
    """
    check_steps_per_second(steps_per_second, 1)
    speeds = np.asarray(steps_per_second, np.float64)[1:]
    seconds = np.minimum.accumulate(1 / speeds[::-1])[::-1]
    corners = []
    for b, s in enumerate(seconds):
        # A corner on or above the line between its neighbours is none.
        while len(corners) > 1:
            (b0, s0), (b1, s1) = corners[-2:]
            if (s1 - s0) * (b - b0) < (s - s0) * (b1 - b0):
                break
            corners.pop()
        corners.append((b, s))
    hull = 1 / np.interp(np.arange(seconds.size), *zip(*corners))
    return np.concatenate([hull[:1], hull])
