"""Conversions compute the same, layouts hold what they claim, and both programs say what is wrong in one line."""

import builtins
import dataclasses
import functools
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
import public_pairs as public
from dspark_jax import drafter as drafter_lib
from dspark_jax.backbone import Attention
from dspark_jax.checkpoints import conversions, huggingface, safetensors_files
from dspark_jax.drafter import EXECUTIONS
from dspark_jax.layers import RopeScaling
from golden import GOLDENS
from pairs import expected as golden_values
from train import inspect as inspect_program
from train import measure

VANILLA, GATED, RNN, V1, V2 = (
    "dspark/draft_vanilla", "dspark/draft_gated", "dspark/draft_rnn", "dflash/draft_v1", "dflash/draft_v2")


def teacher_forced(drafter, pair_target):
    """Teacher-forced logits [1, 2, T, Vd] of two blocks."""
    tokens = jnp.asarray(np.arange(30, 62)[None], jnp.int32)
    anchors, keep = jnp.array([[5, 12]]), jnp.ones((1, 2), bool)
    config = drafter.config
    hidden_states = pair_target.hidden_states(tokens)
    features = jnp.concatenate([hidden_states[i + 1] for i in config.target_layer_ids], axis=-1)

    @jax.jit
    def run(params):
        hidden = drafter_lib.training_hidden(config, params, drafter.embedding, features, tokens, anchors, keep)
        predecessors = ds.anchors.predecessors(tokens, anchors, keep, config.block_length)
        return ds.transitions.teacher_forced_logits(
            ds.transitions.get_transition(config.transition), params.get("transition", {}),
            drafter_lib.base_logits(config, drafter.head_rows, hidden), predecessors, hidden)

    return np.asarray(run(drafter.params))


@functools.cache
def scores_before(name):
    return teacher_forced(public.drafter(name), public.target(name))


@pytest.mark.parametrize("name, options", [
    (V1, {"transition": "vanilla"}), (V1, {"transition": "recurrent"}), (V1, {"transition": "context", "rank": 8}),
    (VANILLA, {"transition": "joint"}), (V1, {"convolution_taps": 3, "convolution_group": 8}),
    ("dspark/draft_dflash", {"transition": "vanilla"})], ids=str)
def test_conversions_score_the_same(name, options):
    drafter = public.drafter(name)
    converted = conversions.convert(drafter, **options)
    np.testing.assert_allclose(teacher_forced(converted, public.target(name)), scores_before(name), atol=2e-5)
    assert converted.config.transition == options.get("transition", drafter.config.transition)
    shapes = jax.tree.map(lambda leaf: leaf.shape, drafter_lib.abstract_params(converted.config))
    assert jax.tree.map(jnp.shape, converted.params) == shapes


def test_dflash_becomes_dflash2_and_drafts_the_same(tmp_path):
    target, drafter = public.target(V1), public.drafter(V1)
    converted = conversions.to_dflash2(drafter, rank=8, candidates=5)
    backbone = converted.config.backbone
    assert (backbone.conv_kernel_size, backbone.conv_group_size, converted.config.execution) == (2, 16, "lattice")
    kept = conversions.to_dflash2(conversions.convert(drafter, convolution_taps=3, convolution_group=8)).config.backbone
    assert (kept.conv_kernel_size, kept.conv_group_size) == (3, 8)
    assert not np.any(converted.params["transition"]["successor"])
    ds.save_drafter(converted, tmp_path, "z-lab")
    again = ds.load_drafter(tmp_path, target)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    assert again.config == converted.config
    prompts = [p["prompt_ids"] for p in golden_values("dflash/expected/draft_v1_t0")["prompts"][:2]]
    results = [ds.generate(target, d, prompts, max_new_tokens=32) for d in (drafter, again)]
    assert results[0].tokens == results[1].tokens and results[0].accepted == results[1].accepted


def test_a_selector_runs_as_a_context_gated_head():
    drafter = public.drafter(V2)
    head = conversions.convert(drafter, execution="sequential")
    assert head.params is drafter.params
    assert (head.config.transition, head.config.execution) == ("context", "sequential")
    lattice = conversions.convert(public.drafter(VANILLA), execution="lattice", candidates=9)
    assert (lattice.config.execution, lattice.config.candidates) == ("lattice", 9)


def test_a_constant_channel_makes_a_vanilla_head_a_selector():
    """P h = 1 where a channel of h never changes: checked on states that have one."""
    drafter = public.drafter(VANILLA)
    converted = conversions.convert(drafter, transition="context", constant_feature=(3, 0.5))
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(4, 96)), jnp.float32).at[:, 3].set(0.5)
    tokens, logits = jnp.array([1, 2, 3, 4]), jnp.zeros((4, 260))
    scores = [ds.transitions.teacher_forced_logits(ds.transitions.get_transition(d.config.transition),
                                                   d.params["transition"], logits, tokens, hidden)
              for d in (drafter, converted)]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


@pytest.mark.parametrize("name, options, reason", [
    (VANILLA, {"transition": "context"}, "no channel of h constant"),
    (VANILLA, {"transition": "context", "constant_feature": (96, 1.0)}, "constant_feature"),
    (VANILLA, {"block_layout": "fill_in"}, "predicts the token after its own position"),
    (V1, {"block_layout": "anchor_first"}, "predicts its own position's token"),
    (GATED, {"transition": "vanilla"}, "no such form"),
    (RNN, {"execution": "lattice"}, "depends on the whole path"),
    (V2, {"transition": "vanilla"}, "no such form"),
    (V2, {"convolution_taps": 2}, "has a convolution"),
    (V1, {"transition": "more"}, "unknown name"),
    (V1, {"convolution_taps": 2, "convolution_group": 7}, "conv_group_size"),
    (VANILLA, {"candidates": 261, "execution": "lattice"}, "candidates"),
])
def test_impossible_conversions_say_why(name, options, reason):
    with pytest.raises(ValueError, match=reason):
        conversions.convert(public.drafter(name), **options)


# ------------------------------------------------------------------- layouts


def changed(drafter, **fields):
    backbone = {k: fields.pop(k) for k in list(fields) if k in ("attention", "rope_scaling")}
    config = dataclasses.replace(
        drafter.config, backbone=dataclasses.replace(drafter.config.backbone, **backbone), **fields)
    return dataclasses.replace(drafter, config=config)


SLIDING = (Attention(window=20), Attention())
LAYOUTS = [
    (VANILLA, "deepspec", {}), (VANILLA, "speculators", {}), (VANILLA, "specforge", {}), (VANILLA, "native", {}),
    (GATED, "speculators", {}), (RNN, "specforge", {}), ("dspark/draft_dflash", "speculators", {}),
    ("dspark/draft_dflash", "specforge", {}), (V1, "z-lab", {}), (V1, "speculators", {}), (V2, "z-lab", {}),
    (V2, "native", {}),
    (V2, "speculators", {"output_multiplier": 1.0, "final_logit_softcapping": 0.0}),
    (VANILLA, "deepspec", {"execution": "lattice", "candidates": 7}),
    (VANILLA, "speculators", {"execution": "lattice", "candidates": 7}),
    (VANILLA, "specforge", {"attention": SLIDING, "input_embedding_scale": 2.0, "output_multiplier": 0.5}),
    (VANILLA, "speculators", {"attention": SLIDING}),
    (VANILLA, "speculators", {"attention": (Attention(window=20, causal=True), Attention())}),
    (V1, "z-lab", {"attention": (Attention(window=20, causal=True), Attention())}),
    (V1, "z-lab", {"attention": (Attention(causal=True),) * 2}),
    (V1, "z-lab", {"attention": (Attention(window=9, causal=True),) * 2}),
    (V1, "z-lab", {"rope_scaling": RopeScaling(kind="linear", factor=2.0), "input_embedding_scale": 1.5}),
    (VANILLA, "native", {"attention": SLIDING, "rope_scaling": RopeScaling(kind="linear", factor=2.0)}),
]


@pytest.mark.parametrize("name, layout, fields", LAYOUTS, ids=str)
def test_every_layout_reads_back_what_it_wrote(name, layout, fields, tmp_path):
    drafter = changed(public.drafter(name), **fields)
    ds.save_drafter(drafter, tmp_path, layout, dtype="float32")
    again = ds.load_drafter(tmp_path, public.target(name))
    assert again.config == drafter.config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, drafter.params))
    config = json.loads((tmp_path / "config.json").read_text())
    if layout != "native":
        assert config["sample_from_anchor"] is (drafter.config.layout == "anchor_first")  # never left to be guessed
    if layout == "speculators":
        assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in drafter.config.target_layer_ids]


@pytest.mark.parametrize("name, layout, fields, reason", [
    (V2, "deepspec", {}, "transition 'context'"), (V1, "deepspec", {}, "layout 'fill_in'"),
    (VANILLA, "z-lab", {}, "transition 'vanilla'"), ("dspark/draft_dflash", "z-lab", {}, "layout 'anchor_first'"),
    (V1, "specforge", {}, "layout 'fill_in'"), (V2, "speculators", {}, "output_multiplier 0.5"),
    (VANILLA, "deepspec", {"attention": SLIDING}, "attention"),
    (VANILLA, "deepspec", {"input_embedding_scale": 2.0}, "input_embedding_scale 2.0"),
    (V1, "speculators", {"attention": (Attention(causal=True),) * 2}, "attention"),
    (V1, "z-lab", {"attention": (Attention(window=9), Attention(window=8))}, "one sliding_window"),
    (V1, "z-lab", {"attention": (Attention(window=9), Attention(causal=True))}, "causality"),
    (VANILLA, "nonsense", {}, "allowed: native, "),
    *((VANILLA, layout, {"confidence_with_law": True}, "confidence_with_law True") for layout in
      ("deepspec", "speculators", "specforge")),
])
def test_what_a_layout_cannot_express_is_refused(name, layout, fields, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        ds.save_drafter(changed(public.drafter(name), **fields), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def reduced(name, ids):
    """A drafter cut down to the target ids ``ids``."""
    drafter, target = public.drafter(name), public.target(name)
    table = drafter.params["transition"]
    params = drafter.params | {"transition": table | {"successor": table["successor"][np.array(ids)]}}
    config = dataclasses.replace(drafter.config, draft_vocab_size=len(ids))
    return drafter_lib.attach(config, params, target, np.array(ids))


def test_reduced_vocabularies(tmp_path):
    ids = [*range(32, 127), 10]
    drafter = reduced(VANILLA, ids)
    for layout in ("deepspec", "specforge"):
        with pytest.raises(ValueError, match="draft_vocab_size"):
            ds.save_drafter(drafter, tmp_path / "no", layout)
    ds.save_drafter(drafter, tmp_path / "out", "speculators")
    stored = safetensors_files.read_directory(tmp_path / "out")
    assert stored["d2t"].dtype == "I64" and stored["t2d"].dtype == "BOOL" and stored["lm_head.weight"].shape == (96, 96)
    assert stored["d2t"].map().tolist() == [t - i for i, t in enumerate(ids)]
    again = ds.load_drafter(tmp_path / "out", public.target(VANILLA))
    assert again.config == drafter.config and again.draft_to_target.tolist() == ids and not again.owns_tables
    assert np.array_equal(again.head_rows, drafter.head_rows)

    def members(tensors):
        tensors["t2d"][0] = True

    def outside(tensors):
        tensors["d2t"][3] = 400

    def twice(tensors):
        tensors["d2t"][1] -= 1

    for i, (change, part) in enumerate(((members, "disagree"), (outside, "outside"), (twice, "twice"),
                                        (lambda t: t.pop("t2d"), "'t2d'"), (lambda t: t.pop("d2t"), "'d2t'"),
                                        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight'"))):
        with pytest.raises(ValueError, match=part):
            ds.load_drafter(public.edited_tensors(tmp_path / "out", tmp_path / str(i), change), public.target(VANILLA))


@pytest.mark.parametrize("name, layout", [(VANILLA, "speculators"), (RNN, "specforge"), (V2, "native")])
def test_any_changed_tensor_is_an_error_in_the_layouts_we_write(name, layout, tmp_path):
    ds.save_drafter(public.drafter(name), tmp_path / "out", layout, dtype="float32")
    for tensor in safetensors_files.read_directory(tmp_path / "out"):
        for change in (lambda t: t.pop(tensor), lambda t: t.update({f"{tensor}x": t.pop(tensor)}),
                       lambda t: t.update({tensor: t[tensor][None]}), lambda t: t.update({f"{tensor}.x": t[tensor]}),
                       lambda t: t.update({tensor: t[tensor].astype(np.float16)})):
            with pytest.raises(ValueError, match=repr(tensor)[:-1]):
                huggingface.open_checkpoint(public.edited_tensors(tmp_path / "out", tmp_path / "changed", change))


def test_speculators_without_the_targets_tables(tmp_path):
    """Both are left out together or not at all; the target's are used then."""
    ds.save_drafter(public.drafter(VANILLA), tmp_path / "out", "speculators")
    both = lambda t: [t.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")]
    again = ds.load_drafter(public.edited_tensors(tmp_path / "out", tmp_path / "none", both), public.target(VANILLA))
    assert again.embedding is public.target(VANILLA).embedding()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        with pytest.raises(ValueError, match=name):
            ds.load_drafter(public.edited_tensors(tmp_path / "out", tmp_path / name, lambda t: t.pop(name)),
                            public.target(VANILLA))


def test_nested_fields_win(tmp_path):
    """z-lab: a key of dflash_config goes before the same key at the top."""
    def change(config):
        config.update(output_multiplier=3.0, final_logit_softcapping=1.0, block_size=4, selector_top_k=2)

    drafter = ds.load_drafter(public.edited_config(V2, tmp_path / "z", change), public.target(V2))
    assert drafter.config == public.drafter(V2).config


def test_stating_the_other_block_layout_is_believed(tmp_path):
    state = lambda value: lambda config: config.update(sample_from_anchor=value)
    assert ds.load_drafter(public.edited_config(V1, tmp_path / "a", state(True)), public.target(V1)).config.slots == 8
    shifted = huggingface.load(public.edited_config(VANILLA, tmp_path / "b", state(False))).config
    assert (shifted.layout, shifted.block_length, shifted.slots) == ("fill_in", 6, 7)


WRITTEN = {
    "unknown type": ("speculators", None, {"speculators_model_type": "eagle3"}, "speculators_model_type"),
    "no sizes": ("speculators", None, {"transformer_layer_config": None}, "transformer_layer_config"),
    "a size inside": ("speculators", "transformer_layer_config", {"hidden_size": "96"}, "_config.hidden_size"),
    "layer out of range": ("speculators", None, {"aux_hidden_state_layer_ids": [1, 9]}, "aux_hidden_state_layer_ids"),
    "last layer": ("speculators", None, {"aux_hidden_state_layer_ids": [1, 4]}, "aux_hidden_state_layer_ids"),
    "last layer, depth unknown": (
        "speculators", None, {"aux_hidden_state_layer_ids": [1, 4], "num_target_layers": None}, "target_layer_ids"),
    "width of the target": ("speculators", None, {"target_hidden_size": 64}, "target_hidden_size"),
    "other projector": ("speculators", None, {"projector_type": "conv"}, "projector_type"),
    "draft vocabulary": ("speculators", None, {"draft_vocab_size": 261}, "draft_vocab_size"),
    "too many drafts": ("speculators", "speculators_config", {"proposal_methods": [{"speculative_tokens": 8}]},
                        "speculative_tokens 8"),
    "projector": ("specforge", "dflash_config", {"projector_type": "dflash"}, "dflash_config.projector_type"),
    "nested rank": ("specforge", "dflash_config", {"markov_rank": -1}, "dflash_config.markov_rank"),
    "block layout": ("specforge", None, {"sample_from_anchor": "yes"}, "sample_from_anchor"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The vanilla pair's drafter as a directory of either layout that has no golden."""
    folder = tmp_path_factory.mktemp("written")
    for layout in ("speculators", "specforge"):
        ds.save_drafter(public.drafter(VANILLA), folder / layout, layout)
    return folder


@pytest.mark.parametrize("case", WRITTEN)
def test_bad_configs_of_the_layouts_we_write(case, written, tmp_path):
    layout, section, values, part = WRITTEN[case]
    directory = public.edited_config(
        written / layout, tmp_path / "bad", lambda config: (config[section] if section else config).update(values))
    message = public.refusal(ds.load_drafter, directory, public.target(VANILLA))
    assert message.startswith(f"{directory / 'config.json'}: ") and part in message


# ------------------------------------------------------------------ programs


def program(name, *arguments):
    return subprocess.run([sys.executable, "-m", f"train.{name}", *map(str, arguments)], capture_output=True, text=True)


def test_convert_and_inspect_from_the_command_line(tmp_path):
    done = program("convert", f"--from={GOLDENS / VANILLA}", f"--to={tmp_path / 'out'}", "--layout=speculators",
                   "--execution=lattice")
    assert done.returncode == 0, done.stderr
    assert ds.load_drafter(tmp_path / "out", public.target(VANILLA)).config.execution == "lattice"
    said = program("inspect", tmp_path / "out")
    assert said.returncode == 0, said.stderr
    weights = sum(leaf.size for leaf in jax.tree.leaves(public.drafter(VANILLA).params))
    for part in ("DSpark", "speculators", "vanilla, rank 16", "lattice, 16 candidates", "7 drafts from 7 slots", "0, 2",
                 f"{weights:,}", "hidden size 96, 260 tokens and 4 layers"):
        assert part in said.stdout, said.stdout


def with_law(drafter):
    """The same, but that its confidence head also sees the law of the draft."""
    config = dataclasses.replace(drafter.config, confidence_with_law=True)
    shapes = drafter_lib.abstract_params(config)["confidence"]["law"]
    law = {name: jax.random.normal(jax.random.key(i), shapes[name].shape) for i, name in enumerate(sorted(shapes))}
    head = drafter.params["confidence"] | {"law": law}
    return dataclasses.replace(drafter, config=config, params=drafter.params | {"confidence": head})


def test_convert_leaves_out_a_head_that_sees_the_law(tmp_path):
    """Layouts but our own have no place for it; the drafts are the same without."""
    drafter, target = with_law(public.drafter(VANILLA)), public.target(VANILLA)
    ds.save_drafter(drafter, tmp_path / "native", dtype="float32")
    for layout in ("native", "speculators"):
        done = program("convert", f"--from={tmp_path / 'native'}", f"--to={tmp_path / layout}2", f"--layout={layout}",
                       f"--target={GOLDENS / 'dspark/target'}")
        assert done.returncode == 0, done.stderr
        assert ("no place for it: the confidence head, which" in done.stdout) == (layout != "native"), done.stdout
        again = ds.load_drafter(tmp_path / f"{layout}2", target)
        assert again.config.confidence == (layout == "native")
        options = {"max_new_tokens": 12, "stop_tokens": ()}
        assert ds.generate(target, again, [[3, 4, 5]], **options) == ds.generate(target, drafter, [[3, 4, 5]], **options)


def test_convert_leaves_out_the_copy_term(tmp_path):
    drafter, target = public.drafter(VANILLA), public.target(VANILLA)
    width = drafter.config.backbone.hidden_size
    copying = dataclasses.replace(
        drafter, config=dataclasses.replace(drafter.config, copy_length=2),
        params=drafter.params | {"copying": {"weight": jnp.array([1.0, 3.0]), "kernel": jnp.ones(width)}})
    ds.save_drafter(copying, tmp_path / "native", dtype="float32")
    for layout in ("native", "speculators"):
        done = program("convert", f"--from={tmp_path / 'native'}", f"--to={tmp_path / layout}2", f"--layout={layout}",
                       f"--target={GOLDENS / 'dspark/target'}", "--dtype=float32")
        assert done.returncode == 0, done.stderr
        assert ("no place for it: the copy term" in done.stdout) == (layout != "native"), done.stdout
        expected = copying if layout == "native" else drafter
        again = ds.load_drafter(tmp_path / f"{layout}2", target)
        assert jax.tree.all(jax.tree.map(np.array_equal, again.params, expected.params))
    said = program("inspect", tmp_path / "native2")
    assert "agreement of up to 2 tokens" in said.stdout, said.stdout


def test_convert_says_what_is_lost(tmp_path):
    drafter = public.drafter(VANILLA)
    config = dataclasses.replace(drafter.config, confidence_temperatures=(1.5,) * drafter.config.block_length)
    ds.save_drafter(dataclasses.replace(drafter, config=config), tmp_path / "native")
    for layout, lost in (("speculators", True), ("native", False)):
        done = program("convert", f"--from={tmp_path / 'native'}", f"--to={tmp_path / layout}2", f"--layout={layout}",
                       f"--target={GOLDENS / 'dspark/target'}")
        assert done.returncode == 0, done.stderr
        assert ("no place for it: confidence_temperatures [1.5" in done.stdout) == lost, done.stdout


def test_convert_makes_a_dflash2(tmp_path, capsys):
    done = program("convert", f"--from={GOLDENS / V1}", f"--to={tmp_path}", "--layout=z-lab", "--transition=context",
                   "--rank=8", "--candidates=5")
    assert done.returncode == 0, done.stderr
    expected = conversions.to_dflash2(public.drafter(V1), rank=8, candidates=5)
    again = ds.load_drafter(tmp_path, public.target(V1))
    assert again.config == expected.config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, expected.params))
    inspect_program.main(str(tmp_path))
    said = capsys.readouterr().out
    for part in ("DFlash-2", "z-lab", "context, rank 8", "lattice, 5 candidates", "convolution of 2 taps", "fill_in"):
        assert part in said, said


@pytest.mark.parametrize("arguments, part", [
    (["convert", "--from={}/dspark/draft_vanilla", "--to={}/out", "--layout=z-lab"], "cannot express transition"),
    (["inspect"], "'directory' is missing")])
def test_bad_input_is_one_line_and_exit_code_2(arguments, part):
    done = program(*(argument.format(GOLDENS) for argument in arguments))
    assert done.returncode == 2 and part in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (GOLDENS / "out").exists()


def test_what_cannot_be_inspected_or_written(tmp_path):
    assert "config.json" in public.refusal(inspect_program.main, str(GOLDENS))
    assert "no such directory" in public.refusal(inspect_program.main, str(tmp_path / "nothing"))
    assert "architectures" in public.refusal(inspect_program.main, str(GOLDENS / "dspark/target"))
    alone = huggingface.load(GOLDENS / V1)
    assert "give the target too" in public.refusal(ds.save_drafter, alone, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------- SmolLM2


def in_full_vocabulary(shipped, target):
    """The same drafter with a row for every id of the target: a channel that is 1 after any token pushes away the ids
    that it cannot draft. In sequential execution it drafts what it did; a lattice loses the candidates that such ids
    take among the base logits."""
    config, table = shipped.config, shipped.params["transition"]
    ids, size = np.asarray(shipped.draft_to_target), shipped.config.vocab_size
    predecessor = np.ones((size, config.rank + 1), np.float32)
    predecessor[:, :-1] = table["predecessor"]
    successor = np.zeros((size, config.rank + 1), np.float32)
    successor[:, -1] = -8192.0  # exact in 16 bits
    successor[ids, :-1], successor[ids, -1] = table["successor"], 0.0
    confidence = shipped.params["confidence"]
    head = {"predecessor": jnp.asarray(predecessor), "successor": jnp.asarray(successor)}
    if config.transition == "joint":  # the new channel's gate is open, and opens no other
        head |= {"gate_kernel": jnp.pad(table["gate_kernel"], ((0, 1), (0, 1))), "gate_bias": jnp.append(table["gate_bias"], 40.0)}
    params = shipped.params | {
        "transition": head, "confidence": confidence | {"kernel": jnp.append(confidence["kernel"], 0.0)}}
    config = dataclasses.replace(config, draft_vocab_size=size, rank=config.rank + 1)
    return drafter_lib.attach(config, params, target)


def as_selector(shipped, target):
    """Backbone and tables as those of a DFlash-2. Its slots have learnt another block layout and the gate is random, so
    it drafts badly, but not so badly that nothing is accepted."""
    full = in_full_vocabulary(shipped, target)
    config = dataclasses.replace(full.config, layout="fill_in", transition="none", rank=0, execution="sequential",
                                 confidence=False)
    bare = drafter_lib.attach(config, {"backbone": full.params["backbone"]}, target)
    selector = conversions.to_dflash2(bare, rank=shipped.config.rank)
    head = selector.params["transition"] | {name: full.params["transition"][name][:, :-1] for name in ("predecessor", "successor")}
    return dataclasses.replace(selector, params=selector.params | {"transition": head})


@pytest.fixture(scope="module")
def shipped(smollm2):
    """Without what other layouts have no place for: the copy term, and of the confidence head the temperatures and the sight of
    the law."""
    drafter = conversions.without_copying(ds.load_drafter(measure.SHIPPED_DRAFTER, smollm2))
    config = dataclasses.replace(drafter.config, confidence_temperatures=(), confidence_with_law=False)
    head = {name: array for name, array in drafter.params["confidence"].items() if name != "law"}
    return dataclasses.replace(drafter, config=config, params=drafter.params | {"confidence": head})


def decode(target, drafter, execution):
    """A few tokens after two prompts; with a confidence head, doubtful drafts are not put to verification."""
    prompts = [target.tokenizer.chat([{"role": "user", "content": text}])
               for text in ("What is the sum of 2 and 3?", "Write a Python function that adds two numbers.")]
    return ds.generate(target, drafter, prompts, max_new_tokens=16, execution=execution,
                       confidence_threshold=0.5 if drafter.config.confidence else 0.0)


@pytest.mark.target
@pytest.mark.parametrize("form, executions, layouts", [
    pytest.param(lambda drafter, target: drafter, EXECUTIONS, ("native", "speculators"), id="shipped"),
    pytest.param(in_full_vocabulary, EXECUTIONS, ("deepspec", "specforge"), id="full", marks=pytest.mark.slow),
    pytest.param(as_selector, ("lattice",), ("z-lab", "speculators"), id="selector", marks=pytest.mark.slow)])
def test_the_shipped_drafter_decodes_the_same_from_every_layout(smollm2, shipped, form, executions, layouts, tmp_path):
    """Tokens, accepted and proposed drafts of every round, before saving and after loading. Where a layout cannot hold
    the drafter, another form of it stands in."""
    drafter = form(shipped, smollm2)
    for execution in executions:
        expected = decode(smollm2, drafter, execution)
        assert any(sum(expected.accepted, []))
        if drafter.config.confidence:
            assert len(set(sum(expected.proposed, []))) > 1
            if execution == "sequential":
                assert expected == decode(smollm2, shipped, execution)
        for layout in layouts:
            if not (tmp_path / layout).exists():
                ds.save_drafter(drafter, tmp_path / layout, layout)
            again = ds.load_drafter(tmp_path / layout, smollm2)
            assert again.config == drafter.config and not again.owns_tables
            assert jax.tree.all(jax.tree.map(np.array_equal, again.params, drafter.params))
            assert decode(smollm2, again, execution) == expected, layout


def test_a_directory_with_shards_is_not_written_over(tmp_path):
    (tmp_path / safetensors_files.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="shards of another checkpoint"):
        ds.save_drafter(public.drafter(V1), tmp_path, "z-lab")


@pytest.mark.parametrize("name, load, files", [
    (V1, huggingface.load, {"config.json", "model.safetensors"}),
    ("dspark/target", ds.load_target, {"config.json", "generation_config.json", "model.safetensors"})])
def test_nothing_but_json_and_tensors_is_opened(name, load, files, tmp_path, monkeypatch):
    """Not the pickles and the code that lie beside them."""
    shutil.copytree(GOLDENS / name, tmp_path / "d")
    for other in ("pytorch_model.bin", "pytorch_model.bin.index.json", "modeling_dflash.py", "training_state.rank0.pt"):
        (tmp_path / "d" / other).write_bytes(b"\x80\x04.")
    opened = set()

    def noted(file, *arguments, opener=open, **options):
        if isinstance(file, (str, os.PathLike)) and pathlib.Path(file).is_relative_to(tmp_path):
            opened.add(pathlib.Path(file).name)
        return opener(file, *arguments, **options)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", noted)
    load(tmp_path / "d")
    monkeypatch.undo()
    assert opened == files
