"""Replays recorded rounds on a server under load: what each way of choosing verification lengths gives.

  python -m train.calibrate --out=runs/calibrated --rounds=runs/rounds.npz
  python -m train.simulate --rounds=runs/rounds.npz --calibration=runs/calibrated/calibration.json --out=runs/load
  python -m train.simulate ... --curve=step --bucket=32 --concurrency=8,64,512
  python -m train.simulate ... --profile=runs/capacity.json --concurrency=1,2,4,8      (a measured curve)
  python -m train.simulate ... --rates=1,2,4,8 --slots=64                              (requests that arrive at random)

A policy is "none" (no drafts), "static:3" (always three), "threshold:0.5" (those before the first less sure), "causal" or
"lagged" (the scheduler). With --concurrency, so many requests are decoded together at any time; with --rates, so many
arrive a second and at most --slots are decoded together. --calibration holds the temperatures, and has the rounds replayed
that these were not fitted on; without it, the confidence head is believed as it is.

Three tables are printed: tokens/s of all requests, tokens/s of one, and the tokens verified per request and round, the
anchor included. --out gets them as simulation.json, and load.png. `dspark_jax/simulation.py` says what is simulated and
what is not.
"""

import json
import pathlib
import statistics

import numpy as np
import tqdm
from absl import flags

from dspark_jax import calibration, simulation
from dspark_jax.checkpoints import safetensors_files
from train import capacity as capacity_lib
from train import command_line, measure, plots
from train import rounds as rounds_lib

_ROUNDS = flags.DEFINE_string("rounds", None, "File of rounds (.npz), as train.calibrate keeps it.", required=True)
_CALIBRATION = flags.DEFINE_string("calibration", None, "The calibration.json that train.calibrate wrote.")
_OUT = flags.DEFINE_string("out", None, "Directory for the results.")
_CURVE = flags.DEFINE_enum(
    "curve", "roofline", capacity_lib.CURVES,
    "How the time of a step grows with its tokens b: linear: 1 + b / knee; roofline: max(1, b / knee); step: linear, "
    "compiled for multiples of --bucket tokens. All times --step_seconds."
)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.02, "Time of a step with few tokens.")
_KNEE = flags.DEFINE_float("knee", 64, "Tokens from which on their number matters.")
_BUCKET = flags.DEFINE_integer("bucket", 16, "Tokens that the compiled sizes of --curve=step lie apart.")
_DRAFT_SECONDS = flags.DEFINE_float("draft_seconds", 0.0, "What drafting adds to a step of a given curve.", lower_bound=0.0)
_PROFILE = flags.DEFINE_string("profile", None, "A curve that train.profile_verify measured, in place of a given one.")
_POLICIES = flags.DEFINE_list("policies", None, "Default: none, every static length, threshold:0.5, causal, lagged.")
_CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "2", "4", "8", "16", "32", "64", "128"], "Requests decoded together.")
_RATES = flags.DEFINE_list("rates", None, "Requests that arrive a second, in place of --concurrency.")
_SLOTS = flags.DEFINE_integer("slots", 64, "With --rates: how many are decoded together at most.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 200, "Requests served in each run, beyond those in slots.", lower_bound=1)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "One run with each; results are their means.")
_PLOT = flags.DEFINE_bool("plot", True, "Draw the figure, which needs matplotlib and --out.")

_FIGURES = {"tokens_per_second": ("tokens/s, all requests", 1), "tokens_per_second_per_user": ("tokens/s, one request", 1),
            "verification_length": ("tokens verified per request and round", 2)}


def main():
    if _OUT.value and _PLOT.value:
        plots.check()
    recording = read_recording(_ROUNDS.value, _CALIBRATION.value)
    T = recording.confidence.shape[1]
    policies = _POLICIES.value or ["none", *(f"static:{n}" for n in range(1, T + 1)), "threshold:0.5", "causal", "lagged"]
    for policy in policies:
        simulation.parse_policy(policy, T)
    seeds = numbers("seeds", _SEEDS.value, int, 0)
    if _RATES.value:
        loads = [{"slots": _SLOTS.value, "rate": rate} for rate in numbers("rates", _RATES.value, float, 1e-9)]
        names = [f"{load['rate']:g} a second" for load in loads]
    else:
        loads = [{"slots": slots, "rate": None} for slots in numbers("concurrency", _CONCURRENCY.value, int, 1)]
        names = [str(load["slots"]) for load in loads]
    capacity = read_capacity(max(load["slots"] for load in loads) * (T + 1))
    if _OUT.value:
        pathlib.Path(_OUT.value).mkdir(parents=True, exist_ok=True)

    curves = {policy: [] for policy in policies}
    with tqdm.tqdm(total=len(loads) * len(policies), unit="run", leave=False, dynamic_ncols=True) as progress:
        for load in loads:
            for policy in policies:
                outcomes = [
                    simulation.simulate(
                        recording, capacity.steps_per_second, policy, **load, requests=load["slots"] + _REQUESTS.value,
                        seed=seed, plain_steps_per_second=capacity.plain_steps_per_second).as_dict()
                    for seed in seeds]
                curves[policy].append(mean_of(outcomes))
                progress.update()

    print(f"capacity: {capacity.source}\nmeans of seeds {', '.join(map(str, seeds))}")
    for figure, (title, digits) in _FIGURES.items():
        rows = [[name, *(f"{curves[policy][i][figure]:.{digits}f}" for policy in policies)] for i, name in enumerate(names)]
        print(f"\n{title}\n{measure.table(['load', *policies], rows)}")
    spread = max(o["tokens_per_second_spread"] / o["tokens_per_second"] for outcomes in curves.values() for o in outcomes)
    print(f"\ntokens/s of single seeds lie within {100 * spread:.1f} % of the means")
    if _OUT.value:
        results = {"capacity": capacity.source, "rounds": len(recording.accepted), "answers": len(recording.tokens),
                   "calibration": _CALIBRATION.value, "seeds": seeds, "loads": loads, "policies": curves}
        (pathlib.Path(_OUT.value) / "simulation.json").write_text(json.dumps(results, indent=2) + "\n")
        if _PLOT.value:
            plots.load_diagram(pathlib.Path(_OUT.value) / "load.png", curves, capacity.source)


def read_recording(rounds_file, calibration_file) -> simulation.Recording:
    """Raises FileNotFoundError or ValueError naming the file."""
    rounds, temperatures = rounds_lib.Rounds.load(rounds_file), ()
    if calibration_file is not None:
        path = pathlib.Path(calibration_file)
        data = safetensors_files.parse_json(path.read_bytes(), path)
        temperatures = data.get("temperatures") if isinstance(data, dict) else None
        if not isinstance(temperatures, list) or not all(type(t) in (int, float) for t in temperatures) or not temperatures:
            raise ValueError(f"--calibration: {path} has no list of temperatures")
        _, rounds = rounds.halves()
    if not len(rounds):
        raise ValueError(f"--rounds: {rounds_file} has no rounds to replay")
    confidence = calibration.calibrated_probabilities(rounds.confidence, temperatures)
    return simulation.record(confidence, rounds.accepted, rounds.proposed, rounds.prompt)


def read_capacity(tokens: int) -> capacity_lib.Capacity:
    """The curve that the flags ask for, for up to ``tokens``."""
    if _PROFILE.value is None:
        return capacity_lib.given(_CURVE.value, tokens, step_seconds=_STEP_SECONDS.value, knee=_KNEE.value,
                                  bucket=_BUCKET.value, draft_seconds=_DRAFT_SECONDS.value)
    capacity = capacity_lib.load(_PROFILE.value)
    if len(capacity.steps_per_second) <= tokens:
        raise ValueError(f"--profile: {_PROFILE.value} was measured for up to {len(capacity.steps_per_second) - 1} tokens; "
                         f"such a load may take {tokens}")
    return capacity


def numbers(flag: str, texts: list[str], kind: type, least) -> list:
    """Raises ValueError naming the flag."""
    try:
        values = [kind(text) for text in texts]
    except ValueError:
        values = []
    if not values or not all(least <= value < np.inf for value in values):
        raise ValueError(f"--{flag}: {','.join(texts)}; must be numbers of at least {least}, separated by commas")
    return values


def mean_of(outcomes: list[dict]) -> dict:
    """Means over seeds, and the largest deviation of tokens/s from its mean."""
    mean = {name: statistics.mean(o[name] for o in outcomes) for name in outcomes[0]}
    rates = [o["tokens_per_second"] for o in outcomes]
    return mean | {"tokens_per_second_spread": max(abs(rate - mean["tokens_per_second"]) for rate in rates)}


if __name__ == "__main__":
    command_line.run(main)
