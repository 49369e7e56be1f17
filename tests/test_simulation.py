"""The load simulator: cases counted by hand, what must be conserved, and what the scheduler is for."""

import json

import numpy as np
import pytest

from dspark_jax import calibration, scheduling, simulation
from program import check_refusals, run, run_module, run_tiny
from train import capacity
from train.rounds import Rounds


def one_answer(accepted, T=2, confidence=0.5):
    rounds = len(accepted)
    return simulation.record(np.full((rounds, T), confidence), accepted, np.full(rounds, T), np.zeros(rounds))


def synthetic(answers=40, rounds=12, T=7, seed=0):
    """Answers of differing difficulty, with confidences that are exactly right."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0.8, 1.0, (answers, 1, 1)) + rng.normal(0, 1.0, (answers, rounds, T))
    confidence = calibration.calibrated_probabilities(z).reshape(-1, T)
    accepted = np.sum(np.cumprod(rng.uniform(size=confidence.shape) < confidence, axis=-1), axis=-1)
    return simulation.record(confidence, accepted, np.full(len(accepted), T), np.repeat(np.arange(answers), rounds))


def test_one_slot_by_hand():
    # Steps of 3 tokens take 2 s: the answer has 3 + 1 + 2 tokens, and every request replays it.
    speeds, recording = np.array([9, 1, 1, 0.5]), one_answer([2, 0, 1])
    result = simulation.simulate(recording, speeds, "static:2", slots=1, requests=3)
    assert (result.tokens, result.rounds, result.verified, result.seconds) == (12, 6, 18, 12.0)
    assert result.tokens_per_second == result.tokens_per_second_per_user == 1.0
    assert (result.concurrency, result.verification_length, result.accepted_length) == (1.0, 3.0, 2.0)
    # One draft at most: 2 + 1 + 2 tokens, then the first recorded round again, of which one token is left to give.
    result = simulation.simulate(recording, speeds, "static:1", slots=1, requests=3)
    assert (result.tokens, result.rounds, result.verified, result.seconds) == (12, 8, 16, 8.0)
    result = simulation.simulate(recording, speeds, "none", slots=1, requests=3)
    assert (result.tokens, result.rounds, result.seconds, result.verification_length) == (12, 12, 12.0, 1.0)
    result = simulation.simulate(recording, speeds, "none", slots=1, requests=3, plain_steps_per_second=[9, 4.0])
    assert result.seconds == 3.0


def test_requests_that_arrive_by_hand():
    recording, speeds = one_answer([1, 1], T=1), np.ones(5)
    rng = np.random.default_rng(7)
    rng.integers(0, 1, 3)
    arrivals = np.cumsum(rng.exponential(100, 3))  # seldom: each request is done, in two steps, before the next
    assert np.diff(arrivals).min() > 2
    result = simulation.simulate(recording, speeds, "static:1", slots=2, requests=3, rate=0.01, seed=7)
    assert result.tokens == 8 and result.rounds == 4 and result.request_seconds == 4.0
    assert result.seconds == pytest.approx(arrivals[2] - arrivals[0]) and result.concurrency < 0.5
    assert result.tokens_per_second_per_user == 2.0
    crowded = simulation.simulate(recording, speeds, "static:1", slots=2, requests=50, rate=1000.0)
    assert crowded.concurrency > 1.9


def test_a_round_that_ended_at_a_stop_token_gives_no_further_token():
    recording = simulation.record(np.ones((3, 3)), [3, 1, 0], [3, 1, 3], ["b", "b", "a"])
    assert recording.starts.tolist() == [0, 1, 3] and recording.tokens.tolist() == [1, 5]
    assert recording.accepted.tolist() == [0, 3, 1]


@pytest.mark.parametrize("policy", ["none", "static:0", "static:3", "static:7", "threshold:0.6", "causal", "lagged"])
def test_tokens_are_conserved_and_a_seed_says_it_all(policy):
    recording, slots, requests = synthetic(), 6, 30
    speeds = simulation.staircase(slots * 8, 0.01, 8, 5)
    lengths = []
    choose = simulation.POLICIES[policy.split(":")[0]]

    def spy(table, value):
        inner = choose(table, value)

        def record(confidence, active):
            chosen = np.asarray(inner(confidence, active))
            accepted = [recording.accepted[np.flatnonzero((recording.confidence == c).all(-1))[0]] for c in confidence]
            lengths.append((chosen[active], np.minimum(accepted, chosen)[active]))
            return chosen

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(simulation.POLICIES, policy.split(":")[0], spy)
        result = simulation.simulate(recording, speeds, policy, slots=slots, requests=requests, seed=3)
    rounds = sum(len(chosen) for chosen, _ in lengths)
    assert result.rounds == rounds and result.verified == sum(sum(chosen) + len(chosen) for chosen, _ in lengths)
    assert result.seconds == pytest.approx(sum(1 / speeds[sum(chosen) + len(chosen)] for chosen, _ in lengths))
    # All accepted drafts and one token a round, but for what an answer's last round has too many.
    surplus = sum(sum(accepted) + len(accepted) for _, accepted in lengths) - result.tokens
    assert 0 <= surplus < 8 * requests
    assert result.concurrency == pytest.approx(slots)
    again = simulation.simulate(recording, speeds, policy, slots=slots, requests=requests, seed=3)
    other = simulation.simulate(recording, speeds, policy, slots=slots, requests=requests, seed=4)
    assert again == result and other.tokens != result.tokens


def test_with_all_drafts_verified_a_request_is_its_recording():
    recording = synthetic()
    result = simulation.simulate(recording, np.ones(9), "static:7", slots=1, requests=50)
    assert result.rounds == 49 * 12
    answers = np.random.default_rng(0).integers(0, 40, 50)
    assert result.tokens == recording.tokens[answers[:49]].sum()


def test_lagged_uses_what_was_known_two_steps_before():
    speeds = np.array([9, 1, 1, 0.9, 0.85, 0.1, 0.1])
    choose, all_rows = simulation.POLICIES["lagged"](speeds, None), np.ones(2, bool)
    sure, unsure = np.full((2, 2), 0.9), np.array([[0.05, 0.1], [0.07, 0.1]])
    given = [choose(c, all_rows).tolist() for c in (unsure, sure, sure, sure, unsure)]
    assert given == [[0, 0], [1, 1], [0, 0], [1, 1], [1, 1]]  # the first two are causal
    assert np.asarray(choose(unsure, np.array([False, True]))).tolist() == [0, 2]


def test_causal_fills_up_the_compiled_size_that_it_ended_in():
    # Sizes of 2, 5 and 6 tokens: the envelope from (2, 1 s) to (5, 1.6 s) stops after one draft, two more are free.
    speeds = scheduling.table_from_buckets([2, 5, 6], [1, 1 / 1.6, 1 / 9], 6)
    confidence = np.array([[0.7, 0.1], [0.2, 0.3]])
    choose = simulation.POLICIES["causal"](speeds, None)
    assert scheduling.schedule_prefixes(confidence, scheduling.monotone_envelope(speeds)).tolist() == [1, 0]
    assert np.asarray(choose(confidence, np.ones(2, bool))).tolist() == [2, 1]
    assert np.asarray(choose(np.zeros((2, 2)), np.ones(2, bool))).tolist() == [0, 0]


@pytest.mark.parametrize("curve", [
    lambda n: simulation.linear(n, 0.02, 40),
    lambda n: simulation.roofline(n, 0.02, 40),
    lambda n: simulation.staircase(n, 0.02, 40, 8),
], ids=["linear", "roofline", "staircase"])
def test_the_scheduler_is_never_worse_than_the_best_fixed_length_nor_than_no_drafts(curve):
    recording, lost = synthetic(), 0
    for slots in (1, 8, 32):
        speeds = curve(slots * 8)
        run = lambda policy, slots=slots, speeds=speeds: simulation.simulate(
            recording, speeds, policy, slots=slots, requests=slots + 40).tokens_per_second
        none, fixed = run("none"), [run(f"static:{length}") for length in range(1, 8)]
        # What one request was sure of two steps before says little of its next drafts, so "lagged" needs company.
        for policy in ("causal", "lagged")[: 1 if slots == 1 else 2]:
            assert run(policy) >= 0.98 * max(none, *fixed), (slots, policy)  # the noise of some thousand rounds
        lost += fixed[-1] < none
    assert lost == 1  # under the highest load, seven drafts each cost more than they give


def test_curves_by_hand():
    np.testing.assert_allclose(1 / simulation.linear(4, 0.5, 2), [0.5, 0.75, 1, 1.25, 1.5])
    np.testing.assert_allclose(1 / simulation.roofline(4, 0.5, 2), [0.5, 0.5, 0.5, 0.75, 1])
    np.testing.assert_allclose(1 / simulation.staircase(5, 0.5, 2, 2), [1, 1, 1, 1.5, 1.5, 2])


@pytest.mark.parametrize("changes, message", [
    ({"policy": "static"}, "policy: 'static'; allowed: none, static:NUMBER, threshold:NUMBER, causal, lagged"),
    ({"policy": "causal:3"}, "policy: 'causal:3'; allowed"),
    ({"policy": "static:3"}, r"policy: 'static:3'; the number must lie in \[0, 2\]"),
    ({"policy": "static:1.5"}, "policy: 'static:1.5'; the number must lie"),
    ({"policy": "threshold:x"}, r"policy: 'threshold:x'; the number must lie in \[0, 1\]"),
    ({"slots": 0}, "slots: 0 for 5 requests"),
    ({"slots": 5}, "more requests than slots"),
    ({"rate": 0.0}, "rate: 0.0; must be positive"),
    ({"slots": 2}, "steps_per_second: 4 entries"),
    ({"steps_per_second": [1, 1, 0, 1]}, "steps_per_second: 0 for 2 tokens"),
    ({"policy": "none", "plain_steps_per_second": [1.0]}, "steps_per_second: shape"),
])
def test_bad_input(changes, message):
    arguments = {"steps_per_second": np.ones(4), "policy": "causal", "slots": 1, "requests": 5} | changes
    with pytest.raises(ValueError, match=message):
        simulation.simulate(one_answer([1, 2]), **arguments)


@pytest.mark.parametrize("arguments, message", [
    ([[[0.5, 2.0]], [1], [0, 1], [2]], "confidence: 2.0"),
    ([[[0.5, 0.5]], [3], [0, 1], [2]], "accepted: must be 1 counts from 0 to 2"),
    ([[[0.5, 0.5]], [1], [0, 1, 1], [2, 1]], "starts: must rise from 0 to 1"),
    ([[[0.5, 0.5]], [1], [0, 1], [0]], "tokens: must be 1 positive lengths"),
])
def test_bad_recordings(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulation.Recording(*map(np.array, arguments))


# --------------------------------------------------------------- the programs


def test_buckets_are_timed_in_turn_after_one_untimed_run():
    calls, clock = [], iter(range(100))

    def step(tokens):
        calls.append(tokens)
        return tokens + next(clock) % 3

    assert capacity.bucket_seconds(step, [10, 20], 3) == [11, 21]
    assert calls == [10, 20] * 4


def test_a_measured_curve_and_its_file(tmp_path):
    curve = capacity.measured([1, 2, 4, 6], [0.1, 0.2, 0.4, 0.5], 0.1, 2, "measured, here")
    np.testing.assert_allclose(1 / curve.steps_per_second, [0.2, 0.2, 0.3, 0.5, 0.5, 0.6, 0.6])
    np.testing.assert_allclose(1 / curve.plain_steps_per_second, [0.1, 0.1, 0.2])
    capacity.save(curve, tmp_path / "c.json", rows=2)
    again = capacity.load(tmp_path / "c.json")
    assert again.source == "measured, here" and again.steps_per_second.tolist() == curve.steps_per_second.tolist()
    for text in ("", "[]", "{}", '{"source": "", "steps_per_second": [1, -1], "plain_steps_per_second": [1, 1]}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ValueError, match="c.json: no capacity curve"):
            capacity.load(tmp_path / "c.json")


def test_given_curves_add_drafting_and_say_that_they_are_given():
    options = {"step_seconds": 0.5, "knee": 2.0, "bucket": 2, "draft_seconds": 0.25}
    curve = capacity.given("step", 3, **options)
    np.testing.assert_allclose(1 / curve.steps_per_second[1:], [1.25, 1.25, 1.75])
    np.testing.assert_allclose(1 / curve.plain_steps_per_second[1:], [1.0, 1.0, 1.5])
    assert curve.source == "given, step in sizes of 2 tokens, 500 ms a step, knee at 2 tokens"
    with pytest.raises(ValueError, match="--knee: 0; must be positive"):
        capacity.given("linear", 3, **options | {"knee": 0})


def _save_rounds(path, N=600):
    rng = np.random.default_rng(0)
    logits = rng.normal(1, 1, (N, 3)).astype(np.float32)
    accepted = np.sum(np.cumprod(rng.uniform(size=(N, 3)) < 1 / (1 + np.exp(-logits / 2)), axis=-1), axis=-1)
    names = np.array([f"chat/{i:03d}" for i in range(60)])
    Rounds(confidence=logits, accepted=accepted.astype(np.int32), proposed=np.full(N, 3, np.int32),
           prompt=names[np.arange(N) % 60], set=np.full(N, "chat"), done=names, settings={}).save(path)


def test_the_simulator_prints_tables_and_writes_json_and_a_figure(tmp_path):
    rounds, calibrated, out = tmp_path / "rounds.npz", tmp_path / "calibration.json", tmp_path / "new" / "load"
    _save_rounds(rounds)
    calibrated.write_text('{"temperatures": [2.0, 2.0, 2.0]}')
    result = run_module("train.simulate", f"--rounds={rounds}", f"--calibration={calibrated}", "--concurrency=2,8", "--knee=8",
                  "--requests=20", "--seeds=4,5", f"--out={out}")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["capacity: given, roofline, 20 ms a step, knee at 8 tokens", "means of seeds 4, 5"]
    assert lines[4].split() == [
        "load", "none", "static:1", "static:2", "static:3", "threshold:0.5", "causal", "lagged"]
    results = json.loads((out / "simulation.json").read_text())
    _, half = Rounds.load(rounds).halves()
    assert results["rounds"] == len(half) and results["loads"][1] == {"slots": 8, "rate": None}
    recording = simulation.record(
        calibration.calibrated_probabilities(half.confidence, [2.0] * 3), half.accepted, half.proposed, half.prompt)
    mine = [simulation.simulate(recording, simulation.roofline(32, 0.02, 8), "causal", slots=8, requests=28, seed=seed)
            for seed in (4, 5)]
    rates = [o.tokens_per_second for o in mine]
    assert results["policies"]["causal"][1]["tokens_per_second"] == pytest.approx(np.mean(rates))
    assert results["policies"]["causal"][1]["tokens_per_second_spread"] == pytest.approx(np.ptp(rates) / 2)
    assert lines[6].split()[-2] == f"{np.mean(rates):.1f}"
    assert (out / "load.png").read_bytes().startswith(b"\x89PNG")


BAD = """
import sys
from absl import flags
from train import simulate
for argument in sys.argv[1:]:
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    flags.FLAGS(["simulate", *argument.split()])
    try:
        simulate.main()
    except (ValueError, OSError) as error:
        print(error)
"""


def test_what_the_simulator_is_told_wrong(tmp_path):
    rounds, empty, short = tmp_path / "rounds.npz", tmp_path / "empty.json", tmp_path / "short.json"
    _save_rounds(rounds, N=60)
    empty.write_text('{"temperatures": [1.0, 1.0]}')
    capacity.save(capacity.given("linear", 8, step_seconds=1, knee=1, bucket=1, draft_seconds=0), short)
    cases = {
        f"--rounds={tmp_path}/none.npz": "No such file",
        f"--rounds={empty}": "damaged, or no file of rounds",
        f"--rounds={rounds} --calibration={short}": "has no list of temperatures",
        f"--rounds={rounds} --calibration={empty}": "temperatures: shape (2,); must be one for each of 3 draft positions",
        f"--rounds={rounds} --policies=none,fast": "policy: 'fast'; allowed: none, static:NUMBER",
        f"--rounds={rounds} --policies=static:4": "policy: 'static:4'; the number must lie in [0, 3]",
        f"--rounds={rounds} --concurrency=1,x": "--concurrency: 1,x; must be numbers of at least 1",
        f"--rounds={rounds} --rates=0": "--rates: 0; must be numbers of at least",
        f"--rounds={rounds} --seeds=": "--seeds: ; must be numbers",
        f"--rounds={rounds} --bucket=0": "--bucket: 0; must be positive",
        f"--rounds={rounds} --profile={short} --concurrency=4": "was measured for up to 8 tokens; such a load may take 16",
    }
    check_refusals(run(BAD, *cases), cases)


def test_the_profiler_measures_the_compiled_sizes(tmp_path):
    out = tmp_path / "new" / "c.json"
    result = run_tiny("train.profile_verify", "--drafter=.", "--rows=2", "--context=8", "--repeats=2", f"--out={out}",
                      drafter="block_length=1")
    assert result.returncode == 0, result.stderr
    data, curve = json.loads(out.read_text()), capacity.load(out)
    assert data["buckets"] == [1, 2, 4] and len(data["verify_seconds"]) == 3
    assert len(curve.steps_per_second) == 5 and len(curve.plain_steps_per_second) == 3
    # Three tokens run as four.
    assert curve.steps_per_second[3] == curve.steps_per_second[4] == 1 / (data["verify_seconds"][2] + data["draft_seconds"])
    assert curve.source.startswith("measured, 2 requests, processor ") and data["machine"]["cores"] >= 1
    assert [line.split()[0] for line in result.stdout.splitlines()[:3]] == ["tokens", "1", "2"]
    wrong = run_tiny("train.profile_verify", "--drafter=.", "--context=2047", f"--out={out}", drafter="block_length=1")
    assert wrong.returncode == 2 and "--context: 2047; with a block it exceeds" in wrong.stderr
