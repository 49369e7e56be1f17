"""Target directories: shards, dtypes, tied heads, biases, either spelling of rotary fields, stop tokens, tokenizers."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import dspark_jax as ds
import public_pairs as public
from dspark_jax import layers
from dspark_jax.checkpoints import safetensors_files, targets
from golden import GOLDENS
from train import benchmark_loading

LLAMA, QWEN = "dflash/target_model", "dspark/target"
TOKENS = np.arange(20, 52)[None]


def tensors_of(name):
    return safetensors.numpy.load_file(GOLDENS / name / "model.safetensors")


def test_shards_give_the_same_target(tmp_path):
    tensors = tensors_of(QWEN)
    names = sorted(tensors)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(GOLDENS / QWEN / file, tmp_path)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, tmp_path / file)
    placed = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    found, whole = ds.load_target(tmp_path), public.target(QWEN)
    assert found.config == whole.config
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, whole.params))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="index.json.*model-00002-of-00002"):
        ds.load_target(tmp_path)


@pytest.mark.parametrize("dtype, kept", [(ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float32")])
def test_16_bit_weights(dtype, kept, tmp_path):
    """bfloat16 stays, float16 becomes float32, both keep their numbers; decoding works in either."""
    narrow = lambda tensors: tensors.update({name: array.astype(dtype) for name, array in tensors.items()})
    directory = public.edited_tensors(LLAMA, tmp_path, narrow)
    target = ds.load_target(directory)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(target.params)} == {kept}
    stored = tensors_of(LLAMA)["model.embed_tokens.weight"].astype(dtype)
    assert np.array_equal(np.asarray(target.embedding(), np.float32), stored.astype(np.float32))
    wide = ds.load_target(directory, dtype=jnp.float32)
    logits = wide.logits(TOKENS)
    assert target.logits(TOKENS).dtype == jnp.float32
    np.testing.assert_allclose(target.logits(TOKENS), logits, atol=2.0 if kept == "bfloat16" else 1e-4)
    if kept == "bfloat16":
        result = ds.generate(target, None, [TOKENS[0].tolist()], max_new_tokens=4)
        assert len(result.tokens[0]) == 4


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path):
    copy = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    found = ds.load_target(public.edited_tensors(LLAMA, tmp_path / "same", copy))
    assert "lm_head" not in found.params
    other = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match="'lm_head.weight'.*differs.*tie_word_embeddings"):
        ds.load_target(public.edited_tensors(LLAMA, tmp_path / "other", other))


def test_attention_biases_are_added(tmp_path):
    """With biases of zero nothing changes; with others the logits do."""
    def add(scale):
        def change(tensors):
            for name in [n for n in tensors if "_proj.weight" in n and "self_attn" in n]:
                size = tensors[name].shape[0]
                tensors[name.replace("weight", "bias")] = scale * np.ones(size, np.float32)
        return change

    logits = {}
    for scale in (0.0, 0.1):
        directory = public.edited_tensors(LLAMA, tmp_path / str(scale), add(scale))
        config = json.loads((directory / "config.json").read_text()) | {"attention_bias": True}
        (directory / "config.json").write_text(json.dumps(config))
        logits[scale] = np.asarray(ds.load_target(directory).logits(TOKENS))
    np.testing.assert_allclose(logits[0.0], public.target(LLAMA).logits(TOKENS), atol=1e-5)
    assert np.abs(logits[0.1] - logits[0.0]).max() > 1e-2


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
SPELLINGS = {
    "old": ({"rope_theta": 5e5}, 5e5, None),
    "old, default": ({}, 10000.0, None),
    "old, llama3": ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5,
                    layers.RopeScaling(kind="llama3", **LLAMA3)),
    "older, linear": ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4,
                      layers.RopeScaling(kind="linear", factor=2.0)),
    "new": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
    "new, llama3": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}, 5e5,
                    layers.RopeScaling(kind="llama3", **LLAMA3)),
    "both": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rotary_fields_in_either_spelling(spelling, tmp_path):
    fields, theta, scaling = SPELLINGS[spelling]

    def change(config):
        del config["rope_parameters"]
        config.update(fields)

    config = targets.read_config(public.edited_config(LLAMA, tmp_path / "t", change))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_defaults_and_derived_sizes(tmp_path):
    def change(config):
        for key in ("head_dim", "tie_word_embeddings", "attention_bias", "hidden_act"):
            config.pop(key)
        config["num_key_value_heads"] = None

    config = targets.read_config(public.edited_config(LLAMA, tmp_path / "t", change))
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (24, 4, False)


@pytest.mark.parametrize("generation, config, expected", [
    ({"eos_token_id": [7, 9, 7]}, 257, (7, 9)), ({"eos_token_id": 0}, 257, (0,)), ({}, 257, (257,)), (None, [3], (3,)),
    (None, None, ())])
def test_stop_tokens(generation, config, expected, tmp_path):
    directory = public.edited_config(LLAMA, tmp_path / "t", lambda c: c.update(eos_token_id=config))
    (directory / "generation_config.json").unlink()
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert targets.read_config(directory).stop_tokens == expected


def test_a_tokenizer_comes_with_its_template(tmp_path):
    directory = tmp_path / "t"
    shutil.copytree(GOLDENS / LLAMA, directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": "<|im_end|>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"}))
    target = ds.load_target(directory)
    assert target.config.stop_tokens == (257,)  # what generation_config.json says comes first
    assert target.tokenizer.decode(target.tokenizer.encode("héllo")) == "héllo"
    ids = target.tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 256 and ids[-2] == 257
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": None}
    (directory / "config.json").write_text(json.dumps(config))
    assert ds.load_target(directory).config.stop_tokens == (257,)  # <|im_end|>
    assert public.target(LLAMA).tokenizer is None
    backend.add_special_tokens(["<a>", "<b>", "<c>"])
    backend.save(str(directory / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer.json: 261 tokens"):
        ds.load_target(directory)


BAD = {
    "architecture": (lambda c: c.update(architectures=["MistralForCausalLM"]), "architectures"),
    "two architectures": (lambda c: c.update(architectures=["LlamaForCausalLM"] * 2), "architectures"),
    "activation": (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
    "mlp bias": (lambda c: c.update(mlp_bias=True), "mlp_bias"),
    "window": (lambda c: c.update(layer_types=["sliding_attention"] * 4), "layer_types"),
    "scaling": (lambda c: c.update(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}), "'yarn'"),
    "scaling without a factor": (
        lambda c: c.update(rope_parameters={"rope_theta": 1e4, "rope_type": "linear"}), "rope_parameters.factor"),
    "heads": (lambda c: c.update(num_key_value_heads=3), "num_key_value_heads"),
    "head width": (lambda c: c.update(head_dim=23), "head_dim"),
    "no width": (lambda c: c.update(head_dim=None, num_attention_heads=5, num_key_value_heads=5), "head_dim"),
    "stop token": (lambda c: c.update(vocab_size=200), "eos_token_id"),
    "depth": (lambda c: c.update(num_hidden_layers=5), "model.layers.4."),
    "shallower": (lambda c: c.update(num_hidden_layers=3), "model.layers.3."),
    "norms": (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "_norm.weight"),
    "untied": (lambda c: c.update(tie_word_embeddings=False), "lm_head.weight"),
    "huge": (lambda c: c.update(vocab_size=2**31 - 1, hidden_size=2**31 - 2), "has shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_targets_are_one_clear_line(case, tmp_path):
    change, part = BAD[case]
    directory = public.edited_config(LLAMA, tmp_path / "t", change)
    message = public.refusal(ds.load_target, directory)
    assert message.startswith(f"{directory}/") and part in message


def test_a_place_that_is_no_target(tmp_path):
    for where in (tmp_path / "nothing", tmp_path / "x.bin"):
        assert str(where) in public.refusal(ds.load_target, where)
    assert str(tmp_path / "config.json") in public.refusal(ds.load_target, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: list found"):
        ds.load_target(tmp_path)


def test_nothing_is_read_twice():
    """Every stored tensor of a target is placed once: the headers account for all bytes in memory."""
    stored = safetensors_files.read_directory(GOLDENS / QWEN)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(public.target(QWEN).params))
    assert kept == sum(np.prod(t.shape) * 4 for t in stored.values())


def test_weights_do_not_depend_on_the_file_once_loaded(tmp_path):
    """They are copied from the mapping, not left in it."""
    shutil.copytree(GOLDENS / LLAMA, tmp_path / "t")
    target = ds.load_target(tmp_path / "t")
    file = tmp_path / "t" / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert jax.tree.all(jax.tree.map(np.array_equal, target.params, public.target(LLAMA).params))


def test_the_memory_of_loading(tmp_path):
    """The benchmark of loading, on a checkpoint small enough that its fixed part would show: see its own limit."""
    benchmark_loading.write(tmp_path, 0.02, tied=False)
    found = benchmark_loading.measure(tmp_path)
    assert found["weights"] == 2 * found["parameters"] == sum(
        np.prod(t.shape) * 2 for t in safetensors_files.read_directory(tmp_path).values())
