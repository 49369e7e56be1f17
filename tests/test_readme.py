"""What the README prints is what there is."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_starts_with_the_two_commands_of_which_each_is_one_line():
    assert _blocks("bash")[:2] == [  # .ci/run runs the first two blocks
        "python3 -m venv .venv && . .venv/bin/activate && pip install -e . && python -m train.demo\n",
        'pip install -e ".[test]" && python -m pytest -n auto\n',
    ]


def test_every_program_flag_and_file_of_the_commands_exists():
    commands = re.findall(r"python -m (train\.\w+)([^`&\n]*)", README)
    assert len(commands) >= 5
    for module, arguments in commands:
        spec = importlib.util.find_spec(module)
        assert spec, module
        source = pathlib.Path(spec.origin).read_text(encoding="utf-8")
        for flag, value in re.findall(r"--(\w+)(?:=(\S+))?", arguments):
            assert flag == "help" or f'"{flag}"' in source, f"{module} has no --{flag}"
            assert flag != "config" or (ROOT / value).is_file(), f"there is no {value}"


def test_every_file_that_is_named_exists():
    names = re.findall(r"`((?:dspark_jax|configs|drafters)/[^`*]+|LICENSE)`", README)
    assert len(names) >= 3
    for name in names:
        assert (ROOT / name).exists(), name


@pytest.mark.target
def test_the_python_example_runs_as_printed(monkeypatch, capsys):
    (example,) = _blocks("python")
    assert len(example.splitlines()) <= 15
    monkeypatch.chdir(ROOT)
    exec(compile(example, "<README.md>", "exec"), {})
    *answer, length, identical = capsys.readouterr().out.splitlines()
    assert any(answer)
    assert float(length.removeprefix("accepted length: ")) >= 1
    assert identical == "identical: True"
