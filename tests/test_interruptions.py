"""Runs that are stopped and killed: each goes on, and ends as if nothing had been.

DSPARK_JAX_KILLS says how many times one run is killed; DSPARK_JAX_KILL_SEED makes other times of it.
"""

import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import dspark_jax as ds
import program
import tiny_run
from train import signals

KILLS = int(os.environ.get("DSPARK_JAX_KILLS", "5"))
SEED = int(os.environ.get("DSPARK_JAX_KILL_SEED", "0"))
STEPS, SAVED = 100 + 10 * KILLS, 4  # the run, which must outlast the kills, and the steps between its checkpoints
PATIENCE = 900  # seconds until a program under test counts as stuck

RUN = """
import sys
import tiny_run
from train import loop, signals
workdir, tokens, steps, saved = sys.argv[1:]
config = tiny_run.config(tokens)
config.steps, config.checkpoint_every, config.evaluation.blocks_every = int(steps), int(saved), 0
with signals.stop_requests() as stop:
    loop.train(config, workdir, tiny_run.target(), stop)
"""

BUSY = """
import jax
from train import signals
with signals.stop_requests() as stop:
    endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x > 0, lambda x: 0.5 * x + 1, x)).lower(1.0).compile()
    print("busy", flush=True)
    endless(1.0).block_until_ready()
"""


def start(code, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{program.ROOT}:{program.ROOT / 'tests'}", "XLA_FLAGS": "",
                                "TQDM_DISABLE": "1"}  # its bar would fill the pipe that nobody reads meanwhile
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=program.ROOT, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    """Whether ``condition()`` came to hold while the process was alive."""
    began = time.monotonic()
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.001)
    return False


def end(process):
    """-> (exit code, what it printed)."""
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, errors


class Run:
    """A run in a directory, started over and over; ``saves`` and ``size`` show how far it is."""

    def __init__(self, workdir, tokens):
        self.workdir, self.arguments = pathlib.Path(workdir), (workdir, tokens, STEPS, SAVED)

    def start(self):
        return start(RUN, *self.arguments)

    def finish(self):
        code, out, errors = end(self.start())
        assert code == 0, errors
        return out

    def saving(self):
        return list(self.workdir.glob("checkpoints/*tmp*"))

    def size(self):
        log = self.workdir / "metrics.jsonl"
        return log.stat().st_size if log.exists() else 0

    def params(self):
        return ds.load_drafter(self.workdir, tiny_run.target()).params


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """-> (token file, finished `Run`, seconds until its first step was done)."""
    folder = tmp_path_factory.mktemp("interruptions")
    tiny_run.write_tokens(folder / "tiny.npz")
    run, began = Run(folder / "run", folder / "tiny.npz"), time.monotonic()
    process = run.start()
    assert wait_for(run.size, process)
    seconds = time.monotonic() - began
    code, _, errors = end(process)
    assert code == 0, errors
    return folder / "tiny.npz", run, seconds


@pytest.mark.slow
def test_kills(uninterrupted, tmp_path):
    """SIGKILL at random times: while starting, between and in steps, and while a checkpoint is written."""
    tokens, whole, seconds = uninterrupted
    run, random_ = Run(tmp_path / "killed", tokens), random.Random(SEED)
    kills = []
    print(f"seed {SEED}")
    while len(kills) < KILLS:
        when, before = random_.choice(("starting", "stepping", "saving", "saving")), run.size()
        until = time.monotonic() + random_.uniform(0, seconds) if when == "starting" else math.inf
        process = run.start()
        # Once it trains, the log is longer, or was cut to what is saved, and what was left of killed saves is gone.
        wait_for(lambda until=until, before=before: time.monotonic() > until or run.size() not in (0, before), process)
        if when == "stepping":
            time.sleep(random_.expovariate(20))
        elif when == "saving":
            wait_for(run.saving, process)
            time.sleep(random_.expovariate(100))
        process.kill()
        code, _, errors = end(process)
        assert code in (-signal.SIGKILL, 0), errors
        if code == 0:
            break
        kills.append(when)
        print(f"{when}: {len(run.saving())} unfinished checkpoints left, {run.size()} bytes logged")
    assert len(kills) == KILLS, f"the run was over after {len(kills)} kills"
    run.finish()
    assert not run.saving()
    jax.tree.map(np.testing.assert_array_equal, run.params(), whole.params())


@pytest.mark.slow
def test_stopped_run_goes_on(uninterrupted, tmp_path):
    """SIGTERM ends a run with code 0 and one line, Ctrl-C with 130; the step is saved, and the end is the same."""
    tokens, whole, _ = uninterrupted
    run = Run(tmp_path / "stopped", tokens)
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        before = run.size()
        process = run.start()
        assert wait_for(lambda before=before: run.size() > before, process)
        process.send_signal(number)
        found, out, errors = end(process)
        assert found == code, errors
        (line,) = out.splitlines()
        name = signal.Signals(number).name
        assert line.startswith(f"{name}: stopped; step ") and line.endswith("the same command goes on from there")
        step = int(line.split()[3])
        assert 0 < step < STEPS and (run.workdir / "checkpoints" / str(step)).is_dir() and not run.saving()
        assert "Traceback" not in errors
    assert f"after {STEPS} steps" in run.finish()
    jax.tree.map(np.testing.assert_array_equal, run.params(), whole.params())


def test_second_signal_ends_at_once():
    """While the program is inside one long computation, where Python runs no handler."""
    process = start(BUSY)
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_first_signal_is_a_request(number, code, capsys):
    before = [signal.getsignal(n) for n in signals.SIGNALS]
    with signals.stop_requests() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        began = time.monotonic()
        while not stop.agreed() and time.monotonic() - began < 10:
            time.sleep(0.01)
        assert stop.received == number
    assert [signal.getsignal(n) for n in signals.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(SystemExit) as exit_:
        signals.leave(stop.received, "step 3 is saved")
    assert exit_.value.code == code
    assert capsys.readouterr().out == (
        f"{signal.Signals(number).name}: stopped; step 3 is saved, and the same command goes on from there\n")
