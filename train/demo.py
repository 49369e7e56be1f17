"""Three prompts, decoded by a language model alone and then with a drafter: the same text, in less or more time.

  python -m train.demo
  python -m train.demo --temperature=1 --max_new_tokens=64
  NO_COLOR=1 python -m train.demo

The first time, the target (SmolLM2-135M-Instruct, 93 MB) is fetched into the cache folder; later it works offline. In a
terminal, drafted tokens that the target accepted are green, and its own tokens are in the terminal's colour.
"""

import os
import sys
import time

from absl import flags

import dspark_jax as ds
from dspark_jax.tokenizer import TextStream
from train import command_line, measure

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "Who answers: a .gguf file or smollm2-135m-instruct.")
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: the directory of a saved drafter or of a training run."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "An answer is cut after this many tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Sampling temperature; 0 takes the likeliest token.", lower_bound=0.0
)

PROMPTS = {
    "word problem": "Lena reads 20 pages every day. How many pages does she read in one week? Explain step by step.",
    "Python function": "Write a Python function that returns the largest number in a list.",
    "chat": "How can I sleep better?",
}
_GREEN, _RESET = "\033[32m", "\033[0m"


def main():
    measure.check_drafter(_DRAFTER.value)
    began = time.perf_counter()
    print(f"target:  {_TARGET.value}", flush=True)
    target = measure.load_target(_TARGET.value)
    drafter = measure.load_drafter(_DRAFTER.value, target)
    c = drafter.config
    print(f"drafter: {os.path.relpath(_DRAFTER.value)} ({c.block_length} drafts a round, {c.transition} transition, "
          f"{c.execution} execution)")
    prompts = {name: target.tokenizer.chat([{"role": "user", "content": text}]) for name, text in PROMPTS.items()}
    options = {"max_new_tokens": _MAX_NEW_TOKENS.value, "temperature": _TEMPERATURE.value}

    print(f"answers end after {_MAX_NEW_TOKENS.value} tokens at the latest")
    print("compiling both ways of decoding (not part of any tokens/s) ... ", end="", flush=True)
    compiling = time.perf_counter()
    for prompt in prompts.values():
        for how in (None, drafter):
            measure.warm_up(target, how, prompt, **options)
    print(f"{time.perf_counter() - compiling:.0f} s")

    colour = wants_colour(sys.stdout)
    measured = {}
    for name, prompt in prompts.items():
        print(f"\n=== {name}: {PROMPTS[name]}")
        print("\n--- plain")
        plain, plain_seconds = show(target, None, prompt, colour, **options)
        print(f"\n--- speculative{f' ({_GREEN}green{_RESET}: drafted and accepted)' if colour else ''}")
        result, seconds = show(target, drafter, prompt, colour, **options)
        measured[name] = measure.Measurement(
            result=result, seconds=seconds, plain=plain, plain_seconds=plain_seconds, block_length=c.block_length,
            greedy=_TEMPERATURE.value == 0)

    print("\n" + summary(measured | {"all": measure.merge(list(measured.values()))}))
    if _TEMPERATURE.value > 0:
        print("identical: only at temperature 0; sampled texts differ, their law is the same")
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def show(target, drafter, prompt, colour, **options):
    """Decodes one prompt and prints its text as it comes -> (`ds.Result`, seconds)."""
    text = TextStream(target.tokenizer)
    parts = []
    began = time.perf_counter()
    for part in ds.stream(target, drafter, [prompt], **options):
        parts.append(part)
        new, drafts = part.tokens[0], sum(part.accepted[0])
        drafted = text.push(new[:drafts])
        print(f"{_GREEN}{drafted}{_RESET}" if colour and drafted else drafted, end="")
        print(text.push(new[drafts:]), end="", flush=True)
    seconds = time.perf_counter() - began
    print(text.finish())
    return ds.Result.join(parts), seconds


def summary(measured) -> str:
    """The table at the end: one line a prompt."""
    rows = [
        [
            name,
            f"{m.plain_tokens_per_second:.1f}",
            f"{m.tokens_per_second:.1f}",
            f"{m.ratio:.2f}",
            f"{m.accepted_length:.2f}",
            "-" if m.identical is None else "yes" if m.identical == len(m.result.tokens) else "no",
        ]
        for name, m in measured.items()
    ]
    return measure.table(
        ["", "plain tokens/s", "speculative tokens/s", "ratio", "accepted length", "identical"], rows)


def wants_colour(stream) -> bool:
    """A terminal that knows colours, and a user who has not set NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


if __name__ == "__main__":
    command_line.run(main)
