"""The tiny published-layout pairs in tests/goldens through the library's own loaders, and edits of such directories."""

import functools
import json
import shutil

import pytest
import safetensors.numpy

import dspark_jax as ds
from golden import GOLDENS
from train import command_line

DEEPSPEC = {head: f"dspark/draft_{head}" for head in ("vanilla", "gated", "rnn", "dflash")}
ZLAB = {"v1": "dflash/draft_v1", "v2": "dflash/draft_v2"}
LAYOUT_OF = {name: "deepspec" for name in DEEPSPEC.values()} | {name: "z-lab" for name in ZLAB.values()}


@functools.cache
def target(name):
    """The target of a pair: "dspark/..." Qwen3, "dflash/..." Llama."""
    return ds.load_target(GOLDENS / ("dspark/target" if name.startswith("dspark") else "dflash/target_model"))


@functools.cache
def drafter(name):
    return ds.load_drafter(GOLDENS / name, target(name))


def edited_config(name, directory, change):
    """A copy in ``directory`` of a checkpoint, a name or an absolute path, whose config.json went through ``change``
    (in place)."""
    shutil.copytree(GOLDENS / name, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def edited_tensors(name, directory, change):
    """As `edited_config`, but ``change`` is given the dict of tensors."""
    directory.mkdir(exist_ok=True)
    shutil.copy(GOLDENS / name / "config.json", directory)
    tensors = safetensors.numpy.load_file(GOLDENS / name / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def refusal(call, *arguments):
    """The message of the error that ``call`` raises: one line, which a program ends with, and exit code 2."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        call(*arguments)
    assert command_line.is_bad_input(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)
