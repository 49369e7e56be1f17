"""Published pairs through the library's loaders: decoding as their own code does, and strict loading.

Hidden states, logits and losses are compared in test_target and test_drafter, on weights that another reader has read;
test_drafter checks that both readers agree bit for bit.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dspark_jax as ds
import public_pairs as public
from dspark_jax import drafter as drafter_lib
from dspark_jax import target as target_lib
from dspark_jax.checkpoints import huggingface, safetensors_files, targets
from golden import GOLDENS
from pairs import expected as golden_values

TOKENS = 96  # max_new_tokens of every reference run
CHECKPOINTS = (*public.LAYOUT_OF, "dspark/target", "dflash/target_model")


# ------------------------------------------------------------------ decoding


def deepspec_rounds(accepted):
    """The reference starts one more round where exactly `TOKENS` are there: rounds that start before that."""
    produced, rounds = 1, []
    for m in accepted:
        if produced >= TOKENS:
            break
        rounds.append(m)
        produced += m + 1
    return rounds


def check_deepspec(result, prompts):
    for i, p in enumerate(prompts):
        assert result.tokens[i] == p["output_ids"][p["num_input_tokens"]:], i
        rounds = deepspec_rounds(p["accepted_draft_lengths"])
        assert result.accepted[i] == rounds, i
        assert result.proposed[i] == p["proposal_lengths"][:len(rounds)], i


@pytest.mark.parametrize("head", public.DEEPSPEC)
def test_deepspec_pairs_decode_as_the_reference_does(head):
    """Ids, accepted and proposed drafts of every round, at every confidence threshold and with every stop token."""
    name = public.DEEPSPEC[head]
    target, drafter, expected = public.target(name), public.drafter(name), golden_values(f"dspark/expected_{head}")
    prompts = [p["prompt_ids"] for p in expected["prompts"]]
    result = ds.generate(target, drafter, prompts, max_new_tokens=TOKENS)
    check_deepspec(result, expected["prompts"])
    for run in expected["threshold_runs"].values():
        result = ds.generate(target, drafter, prompts, max_new_tokens=TOKENS, confidence_threshold=run["threshold"])
        check_deepspec(result, run["prompts"])
    for run in expected["stop_runs"]:
        result = ds.generate(target, drafter, prompts, max_new_tokens=TOKENS, stop_tokens=run["stop_token_ids"])
        check_deepspec(result, run["prompts"])


def check_zlab(result, row, case, prompt_length, slots, starts=None):
    """The reference shortens blocks that would pass the token limit, so only rounds before that must agree."""
    full = sum(start + slots <= prompt_length + TOKENS for start in starts or case["round_starts"])
    assert [m + 1 for m in result.accepted[row][:full]] == case["acceptance_lengths"][:full]
    return full


@pytest.mark.parametrize("version", public.ZLAB)
def test_zlab_pairs_decode_as_the_reference_does(version):
    name = public.ZLAB[version]
    target, drafter = public.target(name), public.drafter(name)
    expected = golden_values(f"dflash/expected/draft_{version}_t0")
    prompts = [p["prompt_ids"] for p in expected["prompts"]]
    result = ds.generate(target, drafter, prompts, max_new_tokens=TOKENS)
    for row, p in enumerate(expected["prompts"]):
        assert result.tokens[row] == p["output_ids"]
        assert check_zlab(result, row, p, len(p["prompt_ids"]), drafter.config.slots) >= len(p["round_starts"]) - 5

    stop = expected["stop_case"]
    result = ds.generate(target, drafter, prompts, max_new_tokens=TOKENS, stop_tokens=stop["stop_token_ids"])
    row = stop["prompt_index"]
    assert result.tokens[row] == stop["output_ids"]
    assert [m + 1 for m in result.accepted[row][:-1]] == stop["acceptance_lengths"][:-1]

    small = expected["small_block_case"]
    row, block = small["prompt_index"], small["block_size"]
    short = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, block_length=block - 1))
    result = ds.generate(target, short, [prompts[row]], max_new_tokens=TOKENS)
    assert result.tokens[0] == expected["prompts"][row]["output_ids"]
    starts = len(prompts[row]) + np.cumsum([0, *small["acceptance_lengths"][:-1]])
    check_zlab(result, 0, small, len(prompts[row]), block, starts.tolist())


VARIANTS = golden_values("dflash/expected/variants")


def first_blocks(target, drafter, sequences, starts):
    """Hidden states [B, T, D] of the block behind position starts[b] of each text, without any cache."""
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(tokens, sequences):
        row[:len(sequence)] = sequence
    anchors = np.array(starts, np.int32)[:, None]
    _, tapped = target_lib.forward(target.config, target.params, jnp.asarray(tokens), drafter.config.target_layer_ids)
    return jax.jit(drafter_lib.training_hidden, static_argnums=0)(
        drafter.config, drafter.params, drafter.embedding, jnp.concatenate(tapped, -1), tokens, anchors,
        np.ones(anchors.shape, bool))[:, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_changed_configs_decode_as_the_reference_does(variant, tmp_path):
    """Windows, causality inside the block, an embedding scale: in the first pass and in every round."""
    expected = VARIANTS[variant]

    def change(config):
        for key, value in expected["config_overrides"].items():
            if value == "<<delete key>>":
                config.pop(key)
            elif key == "dflash_config":
                config[key] |= value
            else:
                config[key] = value

    name = f"dflash/{expected['drafter']}"
    target = public.target(name)
    drafter = ds.load_drafter(public.edited_config(name, tmp_path / "changed", change), target)
    kinds = [drafter.config.backbone.attention_of(i) for i in range(2)]
    assert [[kind.causal, kind.window or None] for kind in kinds] == expected["attention"]
    prompts = golden_values(f"dflash/expected/{expected['drafter']}_t0")["prompts"]
    chosen = [prompts[case["prompt_index"]] for case in expected["cases"]]
    result = ds.generate(target, drafter, [p["prompt_ids"] for p in chosen], max_new_tokens=TOKENS)
    sequences = [p["prompt_ids"] + p["output_ids"] for p in chosen]
    hidden = first_blocks(target, drafter, sequences, [len(p["prompt_ids"]) for p in chosen])
    for row, (p, case) in enumerate(zip(chosen, expected["cases"])):
        assert result.tokens[row] == p["greedy_output_ids"]
        check_zlab(result, row, case, len(p["prompt_ids"]), drafter.config.slots)
        np.testing.assert_allclose(hidden[row, 0], case["first_round_hidden_row1"], rtol=0, atol=1e-4)


# ------------------------------------------------------------ strict loading


def same_trees(a, b):
    a, b = jax.tree.flatten(a), jax.tree.flatten(b)
    return a[1] == b[1] and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a[0], b[0]))


@pytest.mark.parametrize("name", public.LAYOUT_OF)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_round_trip_is_bit_exact(name, dtype, tmp_path):
    """Load, save, load; the file that was written has the names, shapes and dtypes of the one that was read."""
    source = GOLDENS / name
    if dtype == "BF16":
        narrow = lambda tensors: tensors.update({k: v.astype(jnp.bfloat16) for k, v in tensors.items()})
        source = public.edited_tensors(name, tmp_path / "narrow", narrow)
    target, layout = public.target(name), public.LAYOUT_OF[name]
    first = ds.load_drafter(source, target)
    ds.save_drafter(first, tmp_path / "saved", layout)
    again = ds.load_drafter(tmp_path / "saved", target)
    assert again.config == first.config and same_trees(first.params, again.params)
    assert np.array_equal(first.embedding, again.embedding) and np.array_equal(first.head_rows, again.head_rows)
    describe = lambda folder: {k: (t.dtype, t.shape) for k, t in safetensors_files.read_directory(folder).items()}
    assert describe(tmp_path / "saved") == describe(source)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "saved"))
    assert old["architectures"] == new["architectures"]
    ignored = {"dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "num_anchors",
               "max_window_layers"}
    for key in set(old) & set(new) - ignored:
        assert old[key] == new[key], key
    # Another reader finds the same numbers.
    theirs, ours = (safetensors.numpy.load_file(f / "model.safetensors") for f in (source, tmp_path / "saved"))
    assert all(np.array_equal(theirs[k], ours[k]) for k in theirs)


@pytest.mark.parametrize("name", public.LAYOUT_OF)
def test_a_drafter_read_without_its_target_saves_the_same(name, tmp_path):
    layout = public.LAYOUT_OF[name]
    alone = huggingface.load(GOLDENS / name)
    ds.save_drafter(alone, tmp_path, layout)
    assert same_trees(ds.load_drafter(tmp_path, public.target(name)).params, public.drafter(name).params)
    if layout == "z-lab":
        with pytest.raises(ValueError, match="read without its target"):
            ds.generate(public.target(name), alone, [[1, 2]])


def test_own_tables_are_kept_and_used(tmp_path):
    name = public.DEEPSPEC["vanilla"]

    def scale(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 0.5

    source = public.edited_tensors(name, tmp_path / "own", scale)
    drafter = ds.load_drafter(source, public.target(name))
    assert drafter.owns_tables
    assert np.array_equal(drafter.head_rows, 0.5 * np.asarray(public.drafter(name).head_rows))
    ds.save_drafter(drafter, tmp_path / "again", "deepspec")
    assert np.array_equal(ds.load_drafter(tmp_path / "again", public.target(name)).head_rows, drafter.head_rows)
    with pytest.raises(ValueError, match="not the target's"):
        ds.save_drafter(drafter, tmp_path / "no", "native")
    assert not public.drafter(name).owns_tables  # bit for bit the target's: one copy in memory
    assert public.drafter(name).embedding is public.target(name).embedding()


def open_only(directory):
    """What loading checks before it reads any weight."""
    config = json.loads((directory / "config.json").read_text())
    if config["architectures"][0] in targets.ARCHITECTURES:
        return targets.read_target(directory)
    return huggingface.open_checkpoint(directory)


ALL_TENSORS = [(name, tensor) for name in CHECKPOINTS
               for tensor in safetensors_files.read_header(GOLDENS / name / "model.safetensors")]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("mutated")


@pytest.mark.parametrize("name, tensor", ALL_TENSORS, ids=lambda value: value.replace("/", "-"))
def test_any_changed_tensor_is_an_error_that_names_it(name, tensor, scratch):
    """Deleted, renamed, reshaped, of the wrong dtype, or one too many: tensor, shapes and file are in the message."""
    shape = None

    def refused(change, *parts):
        directory = public.edited_tensors(name, scratch / name.replace("/", "-"), change)
        message = public.refusal(open_only, directory)
        for part in (str(directory), *parts):
            assert part in message, message

    def delete(t):
        nonlocal shape
        shape = list(t[tensor].shape)
        del t[tensor]

    refused(delete, repr(tensor), "missing")
    refused(delete, repr(tensor), str(shape))
    refused(lambda t: t.update({f"{tensor}x": t.pop(tensor)}), repr(tensor), str(shape), repr(f"{tensor}x"))
    refused(lambda t: t.update({tensor: t[tensor].reshape(-1, 1)}), repr(tensor), str(shape), "model.safetensors")
    refused(lambda t: t.update({tensor: t[tensor][1:]}), repr(tensor), "model.safetensors")
    refused(lambda t: t.update({tensor: t[tensor].astype(np.float16)}), repr(tensor), str(shape), "F16", "F32")
    refused(lambda t: t.update({tensor: t[tensor].astype(np.int32)}), repr(tensor), str(shape), "I32", "F32")
    refused(lambda t: t.update({f"{tensor}.more": t[tensor]}), repr(f"{tensor}.more"), str(shape), "model.safetensors")


def remove(*keys):
    def change(config):
        for key in keys:
            del config[key]
    return change


def put(section=None, **values):
    return lambda config: (config if section is None else config[section]).update(values)


BAD_CONFIGS = {
    "unknown architecture": ("dspark/draft_vanilla", put(architectures=["Gemma4DSparkModel"]), "architectures"),
    "no architecture": ("dspark/draft_vanilla", remove("architectures"), "architectures"),
    "a target as a drafter": ("dspark/target", put(), "architectures"),
    "missing field": ("dspark/draft_vanilla", remove("block_size"), "block_size"),
    "text for a number": ("dspark/draft_vanilla", put(hidden_size="96"), "hidden_size"),
    "true for a number": ("dspark/draft_vanilla", put(markov_rank=True), "markov_rank"),
    "another width": ("dspark/draft_vanilla", put(hidden_size=64), "fc.weight"),
    "another vocabulary": ("dspark/draft_vanilla", put(vocab_size=259), "weight"),
    "lying depth": ("dspark/draft_vanilla", put(num_hidden_layers=10**9, layer_types=None), "num_hidden_layers"),
    "lying block": ("dspark/draft_vanilla", put(block_size=10**9), "block_size"),
    "unknown head": ("dspark/draft_vanilla", put(markov_head_type="lstm"), "markov_head_type"),
    "other head": ("dspark/draft_vanilla", put(markov_head_type="gated"), "markov_head.gate_proj"),
    "no confidence head": ("dspark/draft_vanilla", put(enable_confidence_head=False), "confidence_head.proj"),
    "no layer ids": ("dflash/draft_v1", lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids"),
    "layer out of range": ("dspark/draft_vanilla", put(target_layer_ids=[0, 9]), "target_layer_ids"),
    "last layer": ("dspark/draft_vanilla", put(target_layer_ids=[0, 3]), "target_layer_ids"),
    "last layer, depth unknown": (
        "dspark/draft_vanilla", put(target_layer_ids=[0, 3], num_target_layers=None), "target_layer_ids"),
    "layers not ascending": ("dspark/draft_vanilla", put(target_layer_ids=[2, 0]), "target_layer_ids"),
    "another depth": ("dspark/draft_vanilla", put(num_target_layers=6), "num_target_layers"),
    "mask outside": ("dflash/draft_v1", put("dflash_config", mask_token_id=260), "mask_token_id"),
    "window without a size": ("dflash/draft_v2", put(sliding_window=None), "sliding_window"),
    "window switched off": ("dflash/draft_v2", put(use_sliding_window=False), "use_sliding_window"),
    "layer types too short": ("dflash/draft_v2", put(layer_types=["full_attention"]), "layer_types"),
    "unknown layer type": ("dflash/draft_v2", put(layer_types=["full_attention", "linear"]), "layer_types"),
    "candidates": ("dflash/draft_v2", put("dflash_config", selector_top_k=261), "selector_top_k"),
    "rotary scaling": ("dflash/draft_v2", put(rope_parameters={"rope_type": "yarn", "factor": 2}), "rope"),
    "two thetas": ("dflash/draft_v2", put(rope_theta=5e5), "rope_parameters"),
    "quantised": ("dflash/draft_v2", put(quantization_config={"bits": 4}), "quantization_config"),
    "huge": ("dspark/draft_vanilla", put(vocab_size=2**31 - 1, hidden_size=2**31 - 2), "has shape"),
    "not finite": ("dflash/draft_v2", put(rms_norm_eps=float("nan")), "rms_norm_eps"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs_are_one_clear_line(case, tmp_path):
    name, change, field = BAD_CONFIGS[case]
    directory = public.edited_config(name, tmp_path / "bad", change)
    message = public.refusal(ds.load_drafter, directory, public.target(name))
    assert message.startswith(f"{directory}/") and field in message


def test_the_drafter_of_another_target_is_refused():
    target = public.target("dspark/target")
    for field, value in (("vocab_size", 300), ("hidden_size", 64), ("num_hidden_layers", 5)):
        other = dataclasses.replace(target, config=dataclasses.replace(target.config, **{field: value}))
        with pytest.raises(ValueError, match=f"config.json: .*{value}"):
            ds.load_drafter(GOLDENS / "dspark/draft_vanilla", other)
    with pytest.raises(FileNotFoundError, match="config.json"):
        ds.load_drafter(GOLDENS, target)
