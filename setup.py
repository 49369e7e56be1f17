"""Installs dspark_jax with its training programs; `pip install -e .` in a checkout is the usual way."""

import pathlib

import setuptools

setuptools.setup(
    name="dspark_jax",
    version="0.1.0",
    description="Block drafters for speculative decoding in JAX: DSpark's Markov head and DFlash-2's Selector",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*setuptools.find_packages(include=["dspark_jax", "dspark_jax.*", "train", "train.*"]), "configs"],
    package_data={"dspark_jax.data": ["*.npz", "*.jsonl", "README.md"]},
    install_requires=[
        "jax>=0.10,<0.11.1",
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12,<0.13",
        "numpy>=2.2,<3",
        "scipy>=1.15,<2",
        "absl-py>=2.3,<3",
        "ml_collections>=1.1,<2",
        "tqdm>=4.67,<5",
        "tensorboardX>=2.6.4,<3",
        "tokenizers>=0.22,<0.24",
        "jinja2>=3.1.6,<4",
        "gguf>=0.19,<0.20",
        "ml_dtypes>=0.5,<0.7",
    ],
    extras_require={
        "test": [
            "pytest>=8.4,<10", "pytest-xdist>=3.8,<4", "safetensors>=0.7,<0.9", "matplotlib>=3.10,<4",
            "nbclient>=0.10.2,<0.12", "nbformat>=5.10,<6", "ipykernel>=6.29,<8",  # tests/test_notebooks.py
        ],
        "plots": ["matplotlib>=3.10,<4"],
        "torch": ["torch>=2.6,<3"],  # only what `train.benchmark` compares a training step with
        "tpu": ["jax[tpu]>=0.10,<0.11.1"],  # brings TPU's compiler, which tests/test_tpu_compile.py asks what it makes
    },
)
