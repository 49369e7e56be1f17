"""The draft head as TPU's own compiler has it. Needs libtpu (`pip install jax[tpu]`), but no TPU."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import tpu_head

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu, TPU's compiler")
WIDTH = tpu_head.V // tpu_head.TENSOR  # of the vocabulary on a chip


@functools.cache
def compiled(way):
    """In a process of its own, since libtpu must find neither a TPU nor a jax that has already looked for one."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    command = [sys.executable, tpu_head.__file__, way, "head"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout.splitlines()[-1])


def gathers_logits(report):
    """Whether what one chip collects from others is as much as the logits of one position, or as wide."""
    return any(max(shape) >= WIDTH or np.prod(shape) >= WIDTH for shape in report["gathers"])


@pytest.mark.parametrize("way", ["sharded", "approximate"])
def test_no_sort_of_the_vocabulary_and_no_logits_on_the_wire(way):
    report = compiled(way)
    assert max(report["sorts"], default=0) < WIDTH / 8
    assert report["gathers"] and not gathers_logits(report), report["gathers"]


def test_the_plain_head_has_both():
    """The same questions, of `jax.lax.top_k` over the logits as they are: the test above can fail."""
    report = compiled("top_k")
    assert max(report["sorts"]) >= WIDTH
    assert gathers_logits(report)
