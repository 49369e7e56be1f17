"""Programs in a process of their own, as a user runs them, and what they say of several bad inputs."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(code, *arguments, **environment):
    """Python ``code`` with these arguments, in the checkout, with the tests importable -> `subprocess.CompletedProcess`."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | environment
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env=environment, check=False,
                          capture_output=True, text=True)


def run_module(name, *arguments):
    """``python -m name`` with these arguments -> `subprocess.CompletedProcess`."""
    return run(f'import runpy; runpy.run_module({name!r}, run_name="__main__")', *arguments)


def run_tiny(name, *arguments, drafter="noise=0.5", **environment):
    """As `run_module`, with a target and a drafter that load at once. drafter: arguments of `tiny.drafter`."""
    return run(f"""
import runpy
import dspark_jax as ds, tiny
ds.load_target = lambda where: tiny.target()
ds.load_drafter = lambda where, target: tiny.drafter(target, {drafter})
runpy.run_module({name!r}, run_name="__main__")
""", *arguments, **environment)


def check_refusals(result, cases):
    """``result`` is of code that went through ``cases`` ({arguments: message}) and printed one refusal a line."""
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(cases)
    for line, message in zip(lines, cases.values()):
        assert message in line
