"""Results that are collected cell by cell in a JSON file, and what has to be the same for all cells of one file.

A cell is a dict under a name such as "vanilla/gsm8k/lattice 16". The file is written again after every cell, so a
measurement that was killed goes on with the cells that are missing.
"""

import ast
import hashlib
import json
import pathlib

import jax
import numpy as np

from dspark_jax.data import sources
from dspark_jax.whole_files import replacing
from train import measure
from train.rounds import fingerprint

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAMP = ("data", "target", "library", "method")
METHODS = ("known_text.py", "sampled_text.py")


class Cells:
    """The cells of the file ``path``, all made with one ``stamp``.

    Raises ValueError where the file is not such a file, or its cells were made with another stamp: a table must not mix them.
    """

    def __init__(self, path, stamp):
        self.path, self.stamp, self.found = pathlib.Path(path), stamp, {}
        if self.path.exists():
            earlier, self.found = read(self.path)
            for name in stamp:
                if earlier[name] != stamp[name]:
                    raise ValueError(f"{path}: its cells were measured with {name} {earlier[name]}, and now it is "
                                     f"{stamp[name]}; choose another --out or delete the file")

    def missing(self, names, drafter=None):
        """Those of ``names`` that have no cell. Raises ValueError for a cell of another ``drafter`` of the same name."""
        for name in names:
            earlier = self.found.get(name, {}).get("drafter", drafter)
            if earlier != drafter:
                raise ValueError(f"{self.path}: cell {name!r} is of drafter {earlier}, and now it is {drafter}; choose "
                                 "another --out or delete the file")
        return [name for name in names if name not in self.found]

    def put(self, name, cell):
        self.found[name] = cell
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in sorted(self.found.items())]
        head = json.dumps({"stamp": self.stamp, "machine": measure.machine()}, indent=1)[:-2]
        with replacing(self.path, "w") as file:
            file.write(head + ',\n "cells": {\n' + ",\n".join(lines) + "\n }\n}\n")


def read(path):
    """-> (stamp, cells) of a file. Raises ValueError that begins with the path."""
    try:
        whole = json.loads(pathlib.Path(path).read_bytes())
        stamp, cells = whole["stamp"], whole["cells"]
        if set(stamp) != set(STAMP) or not all(isinstance(cell, dict) for cell in cells.values()):
            raise ValueError(f"stamp: allowed: {', '.join(STAMP)}; cells: dicts")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no file of cells ({error})") from None
    return stamp, cells


def stamp_of(target):
    """Hashes of the training text and the evaluation prompts, of the target, and of the code that decides the numbers: the
    library, and what is computed of a text here."""
    prompts = [json.dumps([prompt.messages for prompt in sources.evaluation_prompts(name, 60)]).encode()
               for name in sources.EVALUATION_SOURCES]
    return {"data": _hash(sources.SHIPPED_TOKENS.read_bytes(), *prompts),
            "target": fingerprint(target.config, target.params),
            "library": code_hash(sorted((ROOT / "dspark_jax").rglob("*.py"))),
            "method": code_hash([ROOT / "experiments" / name for name in METHODS])}


def code_hash(files):
    """Of what Python files say to the interpreter: comments, docstrings and layout do not count."""
    return _hash(*(ast.dump(_Bare().visit(ast.parse(pathlib.Path(file).read_bytes()))).encode() for file in files))


class _Bare(ast.NodeTransformer):
    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def drafter_hash(drafter):
    """Of the weights, the draft vocabulary and what the backbone is; not of how blocks are drafted."""
    leaves = [*jax.tree.leaves(drafter.params), *([] if drafter.draft_to_target is None else [drafter.draft_to_target])]
    return _hash(repr(drafter.config.backbone).encode(), drafter.config.transition.encode(),
                 *(np.asarray(leaf).tobytes() for leaf in leaves))


def _hash(*parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]
