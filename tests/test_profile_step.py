"""The program that says where the time of a pass goes."""

import json

from program import run_tiny
from train import operations

TEXT = """HloModule jit_run, is_scheduled=true

%fused (param_0: f32[4,4], param_1: f32[4]) -> f32[4] {
  %param_0 = f32[4,4]{1,0} parameter(0)
  %param_1 = f32[4]{0} parameter(1)
  ROOT %dot.3 = f32[4]{0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%moved (param_0: f32[4,4]) -> f32[4,4] {
  %param_0 = f32[4,4]{1,0} parameter(0)
  ROOT %copy.7 = f32[4,4]{0,1} copy(%param_0)
}

ENTRY %main.9 (w: f32[4,4], x: f32[4]) -> f32[4] {
  %w = f32[4,4]{1,0} parameter(0)
  %x = f32[4]{0} parameter(1)
  %copy.1 = f32[4,4]{0,1} copy(%w)
  %dot.2 = f32[4]{0} dot(%copy.1, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %ynn_fusion = f32[4]{0} fusion(%copy.1, %dot.2), kind=kCustom, calls=%fused
  %copy_fusion = f32[4,4]{0,1} fusion(%w), kind=kLoop, calls=%moved
  ROOT %add.5 = f32[4]{0} add(%ynn_fusion, %dot.2)
}
"""


def test_kinds():
    kinds = operations.kinds_of(TEXT)
    assert {name: kinds[name] for name in ("copy.1", "dot.2", "ynn_fusion", "copy_fusion", "add.5")} == {
        "copy.1": "copies", "dot.2": "products", "ynn_fusion": "products", "copy_fusion": "others", "add.5": "others"}


def test_sums():
    events = [("dot.2", 3e6), ("dot.2", 5e6), ("ynn_fusion", 2e6), ("copy.1", 1e6), ("end: dot.2", 9e6), ("main", 9e6)]
    assert operations.add_up(events, TEXT, 2) == {
        "products": {"operations": 1.5, "seconds": 0.005}, "copies": {"operations": 0.5, "seconds": 0.0005},
        "others": {"operations": 0.0, "seconds": 0.0}}


def test_program(tmp_path):
    result = run_tiny("train.profile_step", "--tokens=1,3", "--repeats=3", f"--out={tmp_path / 'out.json'}")
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "out.json").read_bytes())["passes"]
    assert list(found) == ["1", "3"]
    for values in found.values():
        assert values["kinds"]["products"]["operations"] >= 1 and values["kinds"]["others"]["operations"] >= 1
        assert 0 < values["kinds"]["products"]["seconds"] < values["seconds"]["upper_quartile"] * 20
