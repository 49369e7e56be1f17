"""Decodes batches of held-out prompts under every way of choosing verification lengths, on this machine.

  python -m train.profile_verify --rows=8 --out=runs/capacity.json
  python -m train.schedules --profile=runs/capacity.json --drafter=runs/calibrated --out=runs/schedules.json

Prompts of all sets are mixed in each batch, and every answer is --max_new_tokens long, so that all rows stay busy. A
policy is "none" (plain decoding), "static:3", "threshold:0.5", "causal" or "lagged", as in train.simulate; --profile is
the curve that the scheduler goes by. They take turns over the batches, --repeats times, and the fastest time of a batch
counts: what else the machine does can only make it slower. "ratio" is to the best fixed length, of "static:0" to "static:T".
"""

import json
import pathlib

import numpy as np
import tqdm
from absl import flags

import dspark_jax as ds
from dspark_jax import scheduling, simulation
from dspark_jax.data import sources
from train import capacity as capacity_lib
from train import command_line, measure, timing

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Who verifies: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: the directory of a saved drafter or of a training run."
)
_PROFILE = flags.DEFINE_string("profile", None, "The curve that train.profile_verify measured.", required=True)
_POLICIES = flags.DEFINE_list("policies", None, "Default: none, every fixed length, threshold:0.5, causal, lagged.")
_BATCHES = flags.DEFINE_integer("batches", 3, "How many batches of prompts.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Prompts decoded together.", lower_bound=1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of every answer.", lower_bound=2)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Sampling temperature; 0 takes the likeliest token.", lower_bound=0.0
)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed answers to each batch, each way.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "JSON file for the results.")


def main():
    count, names = _BATCHES.value * _BATCH_SIZE.value, sources.EVALUATION_SOURCES
    sets = [sources.evaluation_prompts(name, -(-count // len(names))) for name in names]
    measure.check_drafter(_DRAFTER.value)
    capacity = capacity_lib.load(_PROFILE.value)
    if _OUT.value:
        pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
    target = measure.load_target(_TARGET.value)
    drafter = measure.load_drafter(_DRAFTER.value, target)
    T = drafter.config.block_length
    policies = _POLICIES.value or ["none", *(f"static:{n}" for n in range(T + 1)), "threshold:0.5", "causal", "lagged"]
    schedules = {policy: schedule_of(policy, T, capacity, _BATCH_SIZE.value) for policy in policies}
    prompts = [target.tokenizer.chat(prompt.messages) for turn in zip(*sets) for prompt in turn][:count]
    batches = [prompts[i:i + _BATCH_SIZE.value] for i in range(0, count, _BATCH_SIZE.value)]

    found = run(target, drafter, schedules, batches)
    fixed = [values["tokens_per_second"] for policy, values in found.items() if policy.startswith("static:")]
    print(report(found, max(fixed, default=None)))
    print(f"\ncurve: {capacity.source}\nmeasured on: {', '.join(f'{k} {v}' for k, v in measure.machine().items())}")
    if _OUT.value:
        flag_values = (_DRAFTER, _BATCH_SIZE, _BATCHES, _MAX_NEW_TOKENS, _TEMPERATURE, _REPEATS)
        results = {"settings": {flag.name: flag.value for flag in flag_values}, "machine": measure.machine(),
                   "curve": capacity.source, "policies": found}
        pathlib.Path(_OUT.value).write_text(json.dumps(results, indent=2) + "\n")


def schedule_of(policy, T, capacity, rows):
    """The `Schedule` of a policy's text; None for "none". Raises ValueError, also where the curve is too short."""
    name, value = simulation.parse_policy(policy, T)
    if name == "none":
        return None
    if name in ("static", "threshold"):
        return ds.scheduling.Schedule(name, **({"length": int(value)} if name == "static" else {"threshold": value}))
    speeds = capacity.steps_per_second
    if len(speeds) <= rows * (T + 1):
        raise ValueError(f"--profile: {_PROFILE.value} was measured for up to {len(speeds) - 1} tokens; {rows} rows of "
                         f"{T} drafts need {rows * (T + 1)}")
    # Compiled sizes make the curve a staircase, at the foot of which the causal walk would stop.
    return ds.scheduling.Schedule(name, scheduling.monotone_envelope(speeds) if name == "causal" else speeds)


def run(target, drafter, schedules, batches):
    """{policy: tokens_per_second, accepted_length, verification_length, seconds [batches]}."""
    seconds = {policy: np.full(len(batches), np.inf) for policy in schedules}
    results = {policy: [None] * len(batches) for policy in schedules}

    def answer(policy, i):
        return ds.generate(target, drafter if policy != "none" else None, batches[i], _MAX_NEW_TOKENS.value,
                           _TEMPERATURE.value, stop_tokens=(), schedule=schedules[policy])

    for policy in tqdm.tqdm(schedules, desc="compile", leave=False, dynamic_ncols=True):
        answer(policy, 0)
    turns = [(i, policy) for _ in range(_REPEATS.value) for i in range(len(batches)) for policy in schedules]
    for i, policy in tqdm.tqdm(turns, unit="batch", leave=False, dynamic_ncols=True):
        def call():
            results[policy][i] = answer(policy, i)
        seconds[policy][i] = min(seconds[policy][i], timing.seconds(call))
    return {policy: as_dict(results[policy], seconds[policy]) for policy in schedules}


def as_dict(results, seconds):
    rounds = [(m, n) for r in results for row in zip(r.accepted, r.proposed) for m, n in zip(*row)]
    mean = lambda values: 1 + float(np.mean(values)) if rounds else 1.0
    return {"tokens_per_second": sum(len(tokens) for r in results for tokens in r.tokens) / float(np.sum(seconds)),
            "accepted_length": mean([m for m, _ in rounds]), "verification_length": mean([n for _, n in rounds]),
            "seconds": seconds.tolist()}


def report(found, best) -> str:
    """The table that is printed: one line a policy. best: tokens/s of the best fixed length; None: there is none."""
    rows = [[policy, f"{values['tokens_per_second']:.1f}",
             "-" if best is None else f"{values['tokens_per_second'] / best:.3f}", f"{values['accepted_length']:.3f}",
             f"{values['verification_length']:.2f}"] for policy, values in found.items()]
    return measure.table(["policy", "tokens/s", "ratio", "accepted length", "tokens verified a row and round"], rows)


if __name__ == "__main__":
    command_line.run(main)
