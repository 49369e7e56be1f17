"""The program that decodes real batches under every schedule."""

import json

import numpy as np
import pytest

from program import run_tiny
from train import capacity


@pytest.fixture
def profile(tmp_path):
    curve = capacity.Capacity(steps_per_second=np.linspace(10, 5, 11), plain_steps_per_second=np.linspace(10, 9, 3),
                              source="given")
    capacity.save(curve, tmp_path / "capacity.json")
    return tmp_path / "capacity.json"


def test_all_policies(profile, tmp_path):
    out = tmp_path / "out.json"
    result = run_tiny("train.schedules", "--drafter=.", f"--profile={profile}", "--batches=1", "--batch_size=2",
                      "--repeats=1", "--max_new_tokens=12", f"--out={out}", drafter="noise=0.5, confidence=True")
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_bytes())["policies"]
    T = sum(name.startswith("static:") for name in found) - 1
    assert list(found) == ["none", *(f"static:{n}" for n in range(T + 1)), "threshold:0.5", "causal", "lagged"]
    assert found["none"]["accepted_length"] == found["static:0"]["verification_length"] == 1
    assert found[f"static:{T}"]["verification_length"] == T + 1
    assert all(1 <= f["accepted_length"] <= f["verification_length"] <= T + 1 for f in found.values())
    assert all(f["tokens_per_second"] == pytest.approx(2 * 12 / sum(f["seconds"])) for f in found.values())


@pytest.mark.parametrize("arguments, message", [
    (["--batch_size=8"], "was measured for up to 10 tokens; 8 rows of"),
    (["--policies=often"], "policy: 'often'; allowed:"),
])
def test_bad_input(profile, arguments, message):
    result = run_tiny("train.schedules", "--drafter=.", f"--profile={profile}", *arguments,
                      drafter="noise=0.5, confidence=True")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
