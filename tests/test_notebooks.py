"""The notebooks run from the first cell to the last, and need nothing but what setup.py declares."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 1800  # for one cell; only a machine that does something else besides needs that many
LARGEST = 400_000  # bytes of a file

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _code(path):
    """The source of every code cell."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def _sizes(path, monkeypatch, small):
    """{name: value} that the cell tagged "sizes" sets."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if "sizes" in cell.metadata.get("tags", ())]
    assert len(cells) == 1
    monkeypatch.setenv("DSPARK_JAX_SMALL", small)
    names = {}
    exec(cells[0].source, names)
    return {name: value for name, value in names.items() if name.isupper()}


def _declared():
    """Names of the packages that the notebooks may count on: what is installed always, and for plots."""
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)]
    values = {keyword.arg: keyword.value for call in calls for keyword in call.keywords}
    requirements = ast.literal_eval(values["install_requires"]) + ast.literal_eval(values["extras_require"])["plots"]
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def test_the_readme_names_every_notebook():
    assert len(NOTEBOOKS) == 3
    named = re.findall(r"\]\(notebooks/([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(named) == [path.name for path in NOTEBOOKS]


@every_notebook
def test_imports_are_declared(path):
    imported = set()
    for node in ast.walk(ast.parse("\n".join(_code(path)))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    packages = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert "dspark_jax" in packages
    assert packages <= _declared() | {"dspark_jax", "train", "configs"}


@every_notebook
def test_the_flag_makes_it_smaller(path, monkeypatch):
    small, full = _sizes(path, monkeypatch, "1"), _sizes(path, monkeypatch, "0")
    assert small.pop("SMALL") and not full.pop("SMALL")
    extent = lambda value: len(value) if isinstance(value, tuple) else value
    numbers = {name: (extent(small[name]), extent(full[name])) for name in full if not isinstance(full[name], str)}
    assert all(a <= b for a, b in numbers.values())
    assert sum(a < b for a, b in numbers.values()) >= 2, numbers
    assert "small" in small.get("WORKDIR", "small")  # a full run does not go on from a small one


@every_notebook
def test_was_run_from_top_to_bottom_and_is_not_large(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert path.stat().st_size < LARGEST


def test_the_first_cell_installs_the_checkout_it_finds(tmp_path, monkeypatch):
    (first,) = {_code(path)[0] for path in NOTEBOOKS}  # the same in all of them
    commands, find_spec = [], importlib.util.find_spec
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(first, {})
    assert not commands  # here it is installed

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "dspark_jax" and find_spec(name))
    monkeypatch.chdir(ROOT / "notebooks")
    exec(first, {})
    assert f"{ROOT}[plots]" in commands[-1] and sys.path[0] == str(ROOT)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="clone the repository into this folder"):
        exec(first, {})
    (tmp_path / "clone").symlink_to(ROOT)
    exec(first, {})
    assert f"{tmp_path / 'clone'}[plots]" in commands[-1] and len(commands) == 2


@pytest.mark.slow
@pytest.mark.target
@every_notebook
def test_runs(path, tmp_path):
    environment = os.environ | {"DSPARK_JAX_SMALL": "1", "PYTHONPATH": str(ROOT)}
    # The tests' eight devices share a CPU: a run on them is slower, and no newcomer's.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", environment.pop("XLA_FLAGS", ""))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment | {"XLA_FLAGS": flags})  # raises where a cell does

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    (sizes,) = (cell for cell in cells if "sizes" in cell.metadata.get("tags", ()))
    said = "".join(output.text for output in sizes.outputs)
    assert "SMALL=True" in said
    if steps := re.search(r"STEPS=(\d+)", said):
        (log,) = tmp_path.glob("runs/*/metrics.jsonl")
        assert json.loads(log.read_text().splitlines()[-1])["step"] == int(steps[1])
