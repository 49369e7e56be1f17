"""Part `loading` of `train.benchmark`: the memory that loading a target directory takes.

A synthetic Llama checkpoint in bfloat16 is written to a temporary directory in shards and loaded in a process of its
own. "peak" is the most memory that process ever had resident, mapped files included, less what it had before it began
to load.
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

import dspark_jax as ds
from dspark_jax.checkpoints import safetensors_files, targets


def run(scale, untied) -> dict:
    """Loads a checkpoint of ``scale`` times 1.5 billion parameters -> plain values.

    untied: store an output table apart from the embedding.
    """
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder), scale, tied=not untied)
        done = subprocess.run([sys.executable, "-m", "train.benchmark_loading", folder], capture_output=True, text=True,
                              check=False, cwd=pathlib.Path(__file__).parents[1])
        if done.returncode:
            raise RuntimeError(f"the measuring process failed: {done.stderr}")
    found = json.loads(done.stdout)
    return found | {"ratio": found["peak"] / found["weights"]}


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


def report(found) -> str:
    """The line that is printed."""
    return (f"parameters {found['parameters']:,}, weights {found['weights'] / 1e9:.3f} GB, "
            f"peak {found['peak'] / 1e9:.3f} GB, ratio {found['ratio']:.3f}, {found['seconds']:.1f} s")


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
