"""Programs end with one line and exit code 2 on bad input, and with a traceback on a bug."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

PROGRAM = '''"""Toy program."""
from absl import flags
from ml_collections import config_flags
from dspark_jax.tokenizer import check_messages
from train import command_line
WHAT = flags.DEFINE_string("what", "", "What to do.")
CONFIG = config_flags.DEFINE_config_file("config")
def main():
  match WHAT.value:
    case "value": check_messages([])
    case "file": open("/nonexistent/x")
    case "interrupt": raise KeyboardInterrupt
    case "bug": [].index(3)
    case "config": print(CONFIG.value.a)
command_line.run(main)
'''


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([], 0, ""),
        (["--help"], 0, "Toy program."),
        (["--what=value"], 2, "error: messages: at least one"),
        (["--what=file"], 2, "error: /nonexistent/x: No such file or directory\n"),
        (["--what=interrupt"], 130, "interrupted\n"),
        (["--what=bug"], 1, "Traceback"),
        (["--what=value", "more"], 2, "error: argument 'more' is not a flag; see --help\n"),
        (["--whatt=x"], 2, "error: Unknown command line flag 'whatt'"),
        (["--config=good.py", "--what=config"], 0, "1\n"),
        (["--config=good.py", "--config.inner.rate=2"], 0, ""),
        (["--config=good.py", "--config.inner.rat=2"], 2, "error: config override: no field 'rat'"),
        (["--config", "good.py", "--config.b=2"], 2, "no field 'b'; allowed: config.a, config.inner.rate\n"),
        (["--config=good.py", "--config.a=x"], 2, "error: flag --config.a=x"),
        (["--config=bad.py"], 2, "ValueError: nope\n"),
        (["--config=none.py", "--what=config"], 2, "No such file or directory: 'none.py'\n"),
    ],
)
def test_exit_code_and_message(tmp_path, arguments, code, message):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "good.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n  return ConfigDict({'a': 1, 'inner': {'rate': 1.5}})\n"
    )
    (tmp_path / "bad.py").write_text("def get_config():\n  raise ValueError('nope')\n")
    result = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stderr
    assert message in result.stdout + result.stderr
    if code == 2:
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
