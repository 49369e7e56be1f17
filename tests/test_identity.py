"""The program that compares speculative with plain greedy decoding: what it finds, and that it can find a difference."""

import json

import jax.numpy as jnp
import pytest

import tiny
from program import run, run_tiny
from train import measure


def test_all_is_identical(tmp_path):
    out = tmp_path / "identity.json"
    result = run_tiny("train.identity", "--drafter=.", "--sets=chat", "--count=3", "--max_new_tokens=12",
                      "--batch_sizes=1,2", f"--out={out}")
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_bytes())
    assert [(r["execution"], r["batch"]) for r in found["results"]] == [
        (execution, size) for execution in ("sequential", "lattice") for size in (1, 2)]
    assert all(r["identical"] == r["prompts"] == 3 and r["ties"] == 0 and not r["parted"] for r in found["results"])


def test_a_difference_is_an_error(tmp_path):
    """Speculative decoding with the second best token at one place."""
    result = run("""
import runpy
import dspark_jax as ds, tiny
ds.load_target = lambda where: tiny.target()
ds.load_drafter = lambda where, target: tiny.drafter(target, noise=0.5)
generate = ds.generate
def wrong(target, drafter, *rest, **options):
    result = generate(target, drafter, *rest, **options)
    if drafter is not None:
        result.tokens[0][3] = (result.tokens[0][3] + 1) % target.config.vocab_size
    return result
ds.generate = wrong
runpy.run_module("train.identity", run_name="__main__")
""", "--drafter=.", "--sets=chat", "--count=1", "--max_new_tokens=8", "--executions=lattice", "--batch_sizes=1",
                 f"--out={tmp_path / 'identity.json'}")
    assert result.returncode == 1
    assert "parts at token 3" in result.stdout
    (found,) = json.loads((tmp_path / "identity.json").read_bytes())["results"]
    assert found["identical"] == found["ties"] == 0 and found["parted"][0]["gap"] > measure.TIE


def test_where_answers_part():
    target, prompt = tiny.target(), [3, 5, 7]
    logits = target.logits(jnp.array([[*prompt, 4]]))[0, -1]
    found = measure.parting(target, prompt, [4, 1, 9], [4, 2])
    assert found == {"at": 1, "gap": pytest.approx(float(logits[1] - logits[2]))}
    assert measure.parting(target, prompt, [4], [4, 2]) == {"at": 1, "gap": float("inf")}
