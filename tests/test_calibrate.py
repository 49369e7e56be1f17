"""Rounds and their file, and `python -m train.calibrate` as a user runs it, with a target that loads at once."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny

import dspark_jax as ds
from dspark_jax import calibration
from dspark_jax import drafter as drafter_lib
from dspark_jax.data import sources
from program import check_refusals, run
from train import rounds as rounds_lib
from train.rounds import Rounds

STUB = """
import runpy, sys
import dspark_jax as ds, test_calibrate, tiny
from dspark_jax.data import sources
real = sources.evaluation_prompts
sources.evaluation_prompts = lambda name, count: list(map(test_calibrate.shortened, real(name, count)))
ds.load_target = lambda where: tiny.target()
if "--drafter=." in sys.argv:
    ds.load_drafter = lambda where, target: test_calibrate.sure_drafter(target)
generate = ds.generate
def count(target, drafter, prompts, **options):
    print("decoding", len(prompts))
    return generate(target, drafter, prompts, **options)
ds.generate = count
sys.argv[0] = "calibrate"
runpy.run_module("train.calibrate", run_name="__main__")
"""


def sure_drafter(target):
    """A tiny drafter that is wrong at times, with a confidence head that depends on the predecessor."""
    plain = tiny.drafter(target, noise=0.5)
    config = dataclasses.replace(plain.config, confidence=True)
    params = plain.params | {"confidence": {
        "kernel": jax.random.normal(jax.random.key(3), (2 * config.backbone.hidden_size,)), "bias": np.float32(1.0)}}
    return drafter_lib.attach(config, params, target)


def shortened(prompt):
    """With so few tokens that all prompts are of one compiled size."""
    return dataclasses.replace(prompt, messages=({"role": "user", "content": prompt.messages[-1]["content"][:4]},))


def some_rounds(N, T=2, prompts=10, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(1, 1, (N, T)).astype(np.float32)
    accepted = np.sum(np.cumprod(rng.uniform(size=(N, T)) < 1 / (1 + np.exp(-logits / 2)), axis=-1), axis=-1)
    names = np.array([f"chat/{i}" for i in range(prompts)])
    return Rounds(confidence=logits, accepted=accepted.astype(np.int32), proposed=np.full(N, T, np.int32),
                  prompt=names[np.arange(N) % prompts], set=np.full(N, "chat"), done=names, settings={"temperature": 1.0})


def _same(a, b):
    assert a.settings == b.settings
    for name in ("confidence", "accepted", "proposed", "prompt", "set", "done"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_a_file_of_rounds_comes_back_as_it_was(tmp_path):
    path = tmp_path / "rounds.npz"
    some_rounds(30).save(path)
    _same(Rounds.load(path), some_rounds(30))
    whole = path.read_bytes()
    for bad in (whole[:400], b"", whole[:-200] + whole[-100:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="rounds.npz: damaged, or no file of rounds"):
            Rounds.load(path)
    dataclasses.replace(some_rounds(30), accepted=np.zeros(29, np.int32)).save(path)
    with pytest.raises(ValueError, match="rounds.npz: its arrays do not belong together"):
        Rounds.load(path)


def test_halves_share_no_prompt_and_leave_out_none():
    rounds = some_rounds(500, prompts=100)
    first, second = rounds.halves()
    assert len(first) + len(second) == 500 and min(len(first), len(second)) > 150
    assert not set(first.prompt) & set(second.prompt)
    # A prompt stays in its half, whatever else there is.
    assert set(rounds.where(np.arange(500) < 90).halves()[0].prompt) <= set(first.prompt)


def test_collect_keeps_what_generate_says_and_goes_on_from_a_file(tmp_path, monkeypatch):
    target = tiny.target()
    drafter = sure_drafter(target)
    prompts = list(map(shortened, sources.evaluation_prompts("chat", 4)))
    options = {"batch_size": 2, "max_new_tokens": 20, "temperature": 0.0}
    rounds = rounds_lib.collect(target, drafter, prompts, **options)
    for some in (prompts[:2], prompts[2:]):
        result = ds.generate(target, drafter, [target.tokenizer.chat(prompt.messages) for prompt in some],
                             max_new_tokens=20)
        for i, prompt in enumerate(some):
            mine = rounds.where(rounds.prompt == prompt.id)
            assert mine.accepted.tolist() == result.accepted[i] and mine.proposed.tolist() == result.proposed[i]
            np.testing.assert_allclose(mine.confidence, result.confidence[i], rtol=1e-4, atol=1e-4)
            assert set(mine.set) == {"chat"}
    assert np.ptp(rounds.accepted) > 0 and np.ptp(rounds.confidence) > 1

    file, decoded, generate = tmp_path / "rounds.npz", [], ds.generate
    monkeypatch.setattr(ds, "generate", lambda t, d, p, **o: decoded.append(len(p)) or generate(t, d, p, **o))
    first = rounds_lib.collect(target, drafter, prompts[:2], file, **options)
    more = rounds_lib.collect(target, drafter, prompts, file, **options)
    again = rounds_lib.collect(target, drafter, prompts, file, **options)
    assert decoded == [2, 2] and len(more) == len(rounds)
    _same(more, again)
    _same(more, Rounds.load(file))
    only = rounds_lib.collect(target, drafter, prompts[:2], file, **options)
    np.testing.assert_array_equal(only.confidence, first.confidence)

    with pytest.raises(ValueError, match="was made with max_new_tokens 20, and now it is 21; choose another file"):
        rounds_lib.collect(target, drafter, prompts, file, **options | {"max_new_tokens": 21})
    other = dataclasses.replace(drafter, params=jax.tree.map(lambda x: x + 1, drafter.params))
    with pytest.raises(ValueError, match="was made with drafter"):
        rounds_lib.collect(target, other, prompts, file, **options)
    calibrated = dataclasses.replace(
        drafter, config=dataclasses.replace(drafter.config, confidence_temperatures=(2.0, 2.0, 2.0)))
    _same(rounds_lib.collect(target, calibrated, prompts, file, **options), more)
    with pytest.raises(ValueError, match="--drafter: has no confidence head"):
        rounds_lib.collect(target, tiny.drafter(target), prompts, **options)


def test_the_program_fits_reports_and_saves(tmp_path):
    out, file = tmp_path / "new" / "calibrated", tmp_path / "rounds.npz"
    flags = ("--sets=chat,gsm8k", "--count=8", "--max_new_tokens=40", "--batch_size=4", f"--rounds={file}", f"--out={out}")
    result = run(STUB, "--drafter=.", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("decoding 4") == 4
    lines = [line for line in result.stdout.splitlines() if not line.startswith("decoding")]
    assert " ".join(lines[0].split()) == (
        "draft temperature rounds survived ECE before ECE after AUC Brier before Brier after")
    assert [line.split()[0] for line in lines[1:5]] == ["1", "2", "3", "mean"] and lines[6].startswith("fitted on ")

    results = json.loads((out / "calibration.json").read_text())
    fitted, judged = Rounds.load(file).halves()
    temperatures = calibration.fit_sequential_temperatures(fitted.confidence, fitted.accepted, fitted.proposed)
    assert results["temperatures"] == temperatures.tolist()
    assert results["rounds"] == {"fitted": len(fitted), "judged": len(judged)}
    survival = np.cumprod(calibration.calibrated_probabilities(judged.confidence, temperatures), axis=-1)
    seen = judged.proposed > 1
    ece = calibration.expected_calibration_error(survival[seen, 1], judged.accepted[seen] > 1)
    assert results["after"][1]["ece"] == ece and lines[2].split()[6] == f"{100 * ece:.2f}"
    assert sum(results["after"][0]["reliability"]["count"]) == len(judged)
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")

    target = tiny.target()
    config = ds.load_drafter(out, target).config
    assert config == dataclasses.replace(
        sure_drafter(target).config, confidence_temperatures=tuple(temperatures.tolist()))

    again = run(STUB, "--drafter=.", *flags, "--noplot")  # over what is there, and from the rounds that are there
    assert again.returncode == 0, again.stderr
    assert again.stdout == "\n".join(lines) + "\n"
    assert json.loads((out / "calibration.json").read_text()) == results


BAD = """
import sys
import test_calibrate, tiny
import dspark_jax as ds
from absl import flags
from train import calibrate, rounds
ds.load_target = lambda where: tiny.target()
ds.load_drafter = lambda where, target: test_calibrate.sure_drafter(target)
rounds.collect = lambda *_, **__: test_calibrate.some_rounds(30, prompts=2)
for argument in sys.argv[1:]:
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    flags.FLAGS(["calibrate", "--drafter=.", "--out=nowhere", *argument.split()])
    sys.modules["matplotlib"] = None if argument == "--plot" else sys
    try:
        calibrate.main()
    except ValueError as error:
        print(error)
"""


def test_bad_input(tmp_path):
    for name, file in (("run", "drafter.json"), ("other", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    cases = {
        "--sets=poems": "source 'poems' is unknown",
        "--sets=": "--sets: empty",
        f"--out={tmp_path / 'run'}": "is a training run; allowed: a new directory",
        f"--out={tmp_path / 'other'}": "--out: holds a model of another layout",
        "--plot": "matplotlib is not installed; allowed: pip install -e '.[plots]', or --noplot",
        f"--out={tmp_path / 'new'}": "each needs at least as many as bins, 20: decode more prompts (--count)",
    }
    check_refusals(run(BAD, *cases), cases)
    result = run(STUB, "--drafter=none", "--out=x")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: --drafter: none: no such directory")
