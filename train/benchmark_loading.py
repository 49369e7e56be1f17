"""Measures the memory that loading a target directory takes, on a synthetic checkpoint in bfloat16.

  python -m train.benchmark_loading                       (1.5 billion parameters: 3.1 GB on disk and in memory)
  python -m train.benchmark_loading --scale=0.1 --untied

The checkpoint is written to a temporary directory in shards and loaded in a process of its own. "peak" is the most
memory that process ever had resident, mapped files included, less what it had before it began to load.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import ml_dtypes
import numpy as np
from absl import flags

import dspark_jax as ds
from dspark_jax.checkpoints import safetensors_files, targets
from train import command_line

_SCALE = flags.DEFINE_float("scale", 1.0, "Share of the full size's layers and vocabulary.", lower_bound=0.01)
_UNTIED = flags.DEFINE_bool("untied", False, "Store an output table apart from the embedding.")
_DIRECTORY = flags.DEFINE_string("directory", None, "Where to put the checkpoint; a temporary folder if unset.")
_MEASURE = flags.DEFINE_string("measure", None, "Only load this directory and print the figures as JSON.")

_LIMIT = 1.3  # of the weights' bytes


def main():
    if _MEASURE.value:
        print(json.dumps(measure(_MEASURE.value)))
        return
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as folder:
        write(pathlib.Path(folder), _SCALE.value, tied=not _UNTIED.value)
        done = subprocess.run([sys.executable, "-m", "train.benchmark_loading", f"--measure={folder}"],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the measuring process failed: {done.stderr}")
    found = json.loads(done.stdout)
    ratio = found["peak"] / found["weights"]
    print(f"parameters {found['parameters']:,}, weights {found['weights'] / 1e9:.3f} GB, "
          f"peak {found['peak'] / 1e9:.3f} GB, ratio {ratio:.3f} (limit {_LIMIT}), {found['seconds']:.1f} s")
    if ratio >= _LIMIT:
        raise ValueError(f"ratio {ratio:.3f}: loading holds more than {_LIMIT} times the weights")


def write(folder, scale, tied):
    """A Llama checkpoint with 1.5 billion parameters at scale 1, a few layers a shard, with arbitrary numbers."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960, "head_dim": 128,
        "num_hidden_layers": max(1, round(28 * scale)), "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": max(256, round(151936 * scale)), "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": tied, "hidden_act": "silu", "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).normal(size=1 << 20, scale=0.02).astype(ml_dtypes.bfloat16)
    shards = {}
    for entry in targets.stored_entries(targets.read_config(folder)):
        part = entry.name.split(".")[2] if ".layers." in entry.name else entry.name
        shards.setdefault(int(part) // 4 if part.isdigit() else part, []).append(entry)
    placed = {}
    for number, entries in enumerate(shards.values()):
        file = f"model-{number:05d}.safetensors"
        safetensors_files.write_file(folder / file, {e.name: np.resize(noise, e.shape) for e in entries})
        placed |= {e.name: file for e in entries}
    (folder / safetensors_files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def measure(directory) -> dict:
    """Load a target directory: bytes of its weights in memory, peak above the start in bytes, seconds, parameters."""
    jax.block_until_ready(jax.numpy.zeros(8))  # the backend's own memory is not the checkpoint's
    before, began = _resident("VmRSS"), time.perf_counter()
    target = ds.load_target(directory)
    seconds = time.perf_counter() - began
    leaves = jax.tree.leaves(target.params)
    return {"weights": sum(leaf.nbytes for leaf in leaves), "parameters": sum(leaf.size for leaf in leaves),
            "peak": _resident("VmHWM") - before, "seconds": seconds}


def _resident(field):
    """A memory figure of this process in bytes; Linux only."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status: no field {field}; this benchmark needs Linux")


if __name__ == "__main__":
    command_line.run(main)
