"""`python -m train.demo` with a tiny target, as a terminal shows it."""

import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

PROGRAM = """
import os
import dspark_jax as ds, tiny
from absl import flags
from train import demo
ds.load_target = lambda where: tiny.target()
ds.load_drafter = lambda where, target: tiny.drafter(target, noise=0.5)
flags.FLAGS(["demo", "--drafter=.", "--max_new_tokens=20"])
demo.main()
print("SECOND RUN")
os.environ["NO_COLOR"] = "1"
flags.FLAGS.temperature = 1.0
demo.main()
"""


def _environment(**more):
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    return inherited | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | more


@pytest.fixture(scope="module")
def screens():
    """What a terminal receives in two runs: one in colour, one sampled and with NO_COLOR."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=_environment(TERM="xterm"),
                               stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    received = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            received += chunk
    except OSError:  # how Linux says that the other side has closed
        pass
    os.close(ours)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return received.decode().replace("\r\n", "\n").split("SECOND RUN\n")


def test_drafts_are_green_and_both_texts_are_the_same(screens):
    texts = re.findall(r"\n--- plain\n(.*?)\n\n--- speculative[^\n]*\n(.*?)\n\n(?:===| )", screens[0], re.DOTALL)
    assert len(texts) == 3
    for plain, speculative in texts:
        assert "\x1b[" not in plain and "\x1b[32m" in speculative
        assert re.sub("\x1b\\[[0-9]*m", "", speculative) == plain


def test_the_table_names_every_prompt(screens):
    lines = screens[0].splitlines()
    start = next(i for i, line in enumerate(lines) if "plain tokens/s  speculative tokens/s" in line)
    rows = lines[start + 1:start + 5]
    assert [row.split("  ")[0] for row in rows] == ["word problem", "Python function", "chat", "all"]
    assert all(row.endswith("  yes") for row in rows)
    assert re.fullmatch(r"\d+ s in all", lines[-1])


def test_no_colour_where_it_is_not_wanted_and_sampled_texts_are_not_compared(screens):
    assert "\x1b[" not in screens[1]
    assert re.search(r"^all .* -$", screens[1], re.MULTILINE)


def test_a_missing_drafter_is_one_line_and_exit_code_2():
    result = subprocess.run([sys.executable, "-m", "train.demo", "--drafter=none"], cwd=ROOT, env=_environment(),
                            capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: --drafter: none: no such directory; allowed: a saved drafter or a training run\n"
