"""What a drafter gains: accepted length, acceptance by position, and tokens per second beside plain decoding.

Prompts are decoded one by one, because batch 1 is where speculative decoding is used most. Every prompt takes two steps
untimed first, so that no compilation is measured; plain and speculative decoding alternate, so that whatever else the
machine does meets both alike. T draft positions of a block.
"""

import dataclasses
import itertools
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import tqdm

import dspark_jax as ds

TIE = 1e-3  # of logits between 10 and 30: what a few hundred float32 additions in another order change
SHIPPED_DRAFTER = pathlib.Path(__file__).resolve().parents[1] / "drafters" / "smollm2-135m-dspark"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Some prompts, decoded speculatively and, unless ``plain`` is None, plainly.

    Attributes:
      result, plain: `ds.Result` over the prompts.
      seconds, plain_seconds: wall-clock time of all of it, the pass over the prompt included.
      block_length: T.
      greedy: temperature 0, so that both token sequences should be the same.
    """

    result: ds.Result
    seconds: float
    plain: ds.Result | None
    plain_seconds: float
    block_length: int
    greedy: bool

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round, the target's own included."""
        return self.result.accepted_length

    @property
    def acceptance(self) -> list[float | None]:
        """[T]: the share of rounds in which draft t was accepted, among those that accepted all before it; None where
        there is no such round."""
        rounds = [pair for rows in zip(self.result.accepted, self.result.proposed) for pair in zip(*rows)]
        shares = []
        for t in range(self.block_length):
            reached = [accepted for accepted, proposed in rounds if accepted >= t and proposed > t]
            shares.append(sum(accepted > t for accepted in reached) / len(reached) if reached else None)
        return shares

    @property
    def tokens_per_second(self) -> float:
        return _count(self.result) / self.seconds

    @property
    def plain_tokens_per_second(self) -> float | None:
        return _count(self.plain) / self.plain_seconds if self.plain else None

    @property
    def ratio(self) -> float | None:
        """Speculative over plain tokens per second."""
        return self.tokens_per_second / self.plain_tokens_per_second if self.plain else None

    @property
    def identical(self) -> int | None:
        """Prompts with the same tokens both ways; None where that says nothing."""
        if self.plain is None or not self.greedy:
            return None
        return sum(a == b for a, b in zip(self.result.tokens, self.plain.tokens))

    def as_dict(self) -> dict:
        """Plain values for JSON."""
        names = ("accepted_length", "acceptance", "tokens_per_second", "plain_tokens_per_second", "ratio", "identical")
        counts = {"prompts": len(self.result.tokens), "tokens": _count(self.result), "seconds": self.seconds}
        return {name: getattr(self, name) for name in names} | counts


def evaluate(target, drafter, prompts, *, max_new_tokens=128, temperature=0.0, execution=None, plain=True,
             description=None) -> Measurement:
    """Decode ``prompts`` (lists of token ids) one by one with ``drafter`` and, where ``plain``, without it.

    description: label of a progress bar; None shows none. The other arguments are those of `ds.generate`.
    Raises: as `ds.generate`.
    """
    measured = []
    for seed, prompt in enumerate(tqdm.tqdm(prompts, desc=description, unit="prompt", disable=description is None,
                                            leave=False, dynamic_ncols=True)):
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        result, seconds = _timed(target, drafter, prompt, execution=execution, **options)
        other, other_seconds = _timed(target, None, prompt, **options) if plain else (None, 0.0)
        measured.append(Measurement(
            result=result, seconds=seconds, plain=other, plain_seconds=other_seconds,
            block_length=drafter.config.block_length, greedy=temperature == 0))
    return merge(measured)


def warm_up(target, drafter, prompt, **options) -> None:
    """Compile what decoding ``prompt`` with the same options needs: the pass over the prompt and one step."""
    for _ in itertools.islice(ds.stream(target, drafter, [prompt], **options, stop_tokens=()), 2):
        pass


def _timed(target, drafter, prompt, **options):
    warm_up(target, drafter, prompt, **options)
    began = time.perf_counter()
    result = ds.generate(target, drafter, [prompt], **options)
    return result, time.perf_counter() - began


def merge(measurements) -> Measurement:
    """The measurement over the prompts of all of them, at least one, made with the same settings."""
    return dataclasses.replace(
        measurements[0],
        result=side_by_side([m.result for m in measurements]), seconds=sum(m.seconds for m in measurements),
        plain=side_by_side([m.plain for m in measurements]) if measurements[0].plain else None,
        plain_seconds=sum(m.plain_seconds for m in measurements))


def side_by_side(results) -> ds.Result:
    """The results of several batches as that of all their prompts, in order."""
    names = [field.name for field in dataclasses.fields(ds.Result)]
    return ds.Result(*(sum((getattr(r, name) for r in results), []) for name in names))


def parting(target, prompt, plain, said):
    """Where two different answers part, and how far the target's logit of ``plain``'s token lies above that of ``said``'s;
    infinitely far where one answer ends and the other goes on, which no tie explains."""
    at = next((i for i, (a, b) in enumerate(zip(plain, said)) if a != b), None)
    if at is None:
        return {"at": min(len(plain), len(said)), "gap": float("inf")}
    text = jnp.array([[*prompt, *plain[:at]]])
    logits = target.logits(text)[0, -1]
    return {"at": at, "gap": float(logits[plain[at]] - logits[said[at]])}


def _count(result):
    return sum(map(len, result.tokens))


def table(header, rows) -> str:
    """Lines of text: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in [header, *rows])


def load_target(where):
    """`ds.load_target`, of a target that can read and write text. Raises ValueError where it has no tokenizer."""
    target = ds.load_target(where)
    if target.tokenizer is None:
        raise ValueError(f"--target: {where} has no tokenizer.json, so it cannot read a prompt")
    return target


def load_drafter(where, target, block_length=None):
    """`ds.load_drafter`, run with fewer drafts a block where ``block_length`` says so.

    The slots of a block see each other, so fewer of them change the drafts a little; the output stays the target's.
    Raises ValueError for a length that the drafter was not trained for; else as `ds.load_drafter`.
    """
    drafter = ds.load_drafter(where, target)
    trained = drafter.config.block_length
    if block_length is None or block_length == trained:
        return drafter
    if not 1 <= block_length < trained:
        raise ValueError(f"--block_length={block_length}: allowed: 1 to {trained}, which {where} was trained for")
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, block_length=block_length))


def check_drafter(where, flag="--drafter") -> None:
    """Raises FileNotFoundError where there is no such directory: to be called before a target is fetched."""
    if not pathlib.Path(where).is_dir():
        raise FileNotFoundError(f"{flag}: {where}: no such directory; allowed: a saved drafter or a training run")


def machine() -> dict:
    """What a measurement was made on: processor, cores this process may use, device and versions."""
    processor = platform.processor() or platform.machine()
    if (info := pathlib.Path("/proc/cpuinfo")).exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        processor = next((value.strip() for name, _, value in lines if name.strip() == "model name"), processor)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": processor, "cores": cores, "device": jax.devices()[0].device_kind,
            "python": platform.python_version(), "jax": jax.__version__}
