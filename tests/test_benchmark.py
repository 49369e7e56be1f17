"""`python -m train.benchmark` as a user runs it, at tiny sizes; and that what it times is what it says."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
import tiny

import dspark_jax as ds
from dspark_jax.transitions import TRANSITIONS
from program import run_tiny
from train import benchmark_decode, benchmark_head, benchmark_train, timing

def _run(*arguments):
    # Programs this small take longer to compile than to run.
    return run_tiny("train.benchmark", *arguments, XLA_FLAGS="--xla_backend_optimization_level=0")


def _times(tree):
    """Every summary of times in a JSON tree."""
    if isinstance(tree, list):
        return [times for value in tree for times in _times(value)]
    if not isinstance(tree, dict):
        return []
    return [tree] if "median" in tree else _times(list(tree.values()))


def test_the_program_prints_tables_and_writes_json(tmp_path):
    out = tmp_path / "new" / "result.json"
    result = _run(
        "--parts=head,decode,train,loading", "--repeats=2", "--head_vocab=300", "--head_rank=4", "--head_candidates=3",
        "--head_drafts=3", "--head_batches=2", "--execution=lattice", "--decode_drafts=2", "--decode_batches=1",
        "--decode_prompts=1", "--decode_repeats=1", "--max_new_tokens=9", "--train_drafts=2", "--train_anchors=3",
        "--loading_scale=0.01", f"--out={out}")
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert list(found) == ["settings", "machine", "head", "decode", "train", "loading"]
    assert found["settings"]["head_vocab"] == 300 and found["machine"]["memory_bytes_per_second"] > 1e8
    times = _times(found)
    assert all(0 < t["lower_quartile"] <= t["median"] <= t["upper_quartile"] for t in times)

    (head,) = found["head"]
    assert (head["batch"], head["drafts"], head["logits_bytes"]) == (2, 3, 2 * 3 * 300 * 4)
    assert list(head["seconds"]) == ["sequential", "lattice", "candidates", "scores + walk", "read"]
    assert head["lattice_over_read"] > 0 and head["sequential_over_lattice"] > 0

    (rounds,) = found["decode"]["rounds"]
    assert list(rounds["plain"]) == ["plain step", "decoder", "logits, draw"]
    assert list(rounds["rounds"][0]["seconds"]) == [
        "round", "backbone", "head", "candidates", "scores + walk", "verify", "logits, rule", "commit"]
    assert rounds["memory_bytes_per_second"] > 1e8 and 0 < rounds["rounds"][0]["walk_over_round"]
    decoding = found["decode"]["decoding"]
    assert [(row["mode"], row["drafts"]) for row in decoding] == [("plain", None), ("speculative", 2), ("replayed", 2)]
    assert decoding[2]["accepted_length"] > 2.6  # 3 but for the last round
    assert all(row["tokens"] == 9 and row["identical"] == 1 for row in decoding)

    assert found["train"]["temporary_bytes"] > 0 and found["train"]["positions_per_second"]["jax"] > 0
    assert found["loading"]["weights"] == 2 * found["loading"]["parameters"] and found["loading"]["ratio"] > 0

    lines = result.stdout.splitlines()
    assert [line for line in lines if line in found] == ["head", "decode", "train", "loading"]
    for start in ("batch  drafts ", "batch 1, cache of ", "round / plain step ", "speculative ", "jax ", "parameters "):
        assert any(line.startswith(start) for line in lines), start
    assert lines[-1].startswith("measured on: processor ") and lines[-1].endswith(" GB/s")


@pytest.mark.parametrize("arguments, message", [
    (["--parts=head,tail"], "--parts=head,tail: allowed: some of head, decode, train, loading"),
    (["--head_drafts=7,x"], "--head_drafts=7,x: allowed: whole numbers of at least 1, such as 1,8"),
    (["--head_vocab=9", "--head_candidates=10"], "--head_candidates=10: allowed: 1 to 9, the vocabulary"),
    (["--parts=train", "--drafter=none"], "--drafter: none: no such directory"),
])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = _run(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_an_interpreter_without_torch_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match=f"--torch_python: {python} cannot import torch"):
        benchmark_train.torch_interpreter(str(python))
    with pytest.raises(FileNotFoundError):
        benchmark_train.torch_interpreter(str(tmp_path / "none"))


def test_calls_take_turns_and_slow_ones_fewer(monkeypatch):
    cost, made = {"fast": 0.5, "slow": 4.0}, []
    monkeypatch.setattr(timing, "seconds", lambda name: made.append(name) or cost[name])
    calls = {name: name for name in cost}

    times = timing.alternate(calls, repeats=2)
    assert made == ["fast", "slow"] + ["fast", "slow"] * 2 and times["slow"]["median"] == 4.0
    made.clear()
    timing.alternate(calls, repeats=1, settle=True)
    assert made == ["fast", "slow"] + ["fast", "fast", "slow", "slow"]
    made.clear()
    times = timing.alternate(calls, repeats=10, budget=24.0)  # 10 calls at 0.5 s fit, and 6 at 4 s
    assert (times["fast"]["repeats"], times["slow"]["repeats"]) == (10, 6)
    turns = " ".join(made[4:]).replace("fast slow", "both").split()  # two calls before, untimed, of each
    assert turns == ["fast", "both"] * 2 + ["both"] + ["fast", "both"] * 2 + ["both"]
    assert timing.alternate(calls, repeats=10, budget=1.0)["slow"]["repeats"] == timing.FEWEST
    assert timing.alternate(calls, repeats=2, budget=1.0)["slow"]["repeats"] == 2


def test_summaries():
    assert timing.summary([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0, "repeats": 5}
    assert timing.cell(timing.summary([0.001, 0.002, 0.003]), digits=1) == "2.0 (1.5-2.5)"
    assert timing.memory_rate({"a": {"median": 2.0}, "b": {"median": 0.5}}) == 2 * timing.READ


def test_memory_is_read_and_not_folded_away():
    for call in timing.memory_reads().values():
        np.testing.assert_allclose(np.sum(call()), timing.READ / 4)


def test_the_parts_of_a_lattice_are_the_lattice():
    vocabulary = jnp.array([1, 2, 4, 5, 7, 9, 11, 12, 15, 18])
    params, logits, hidden, anchors = slow.random_block("joint", Vd=10, lead=(2,))
    transition, rest = TRANSITIONS["joint"], (hidden, anchors, jax.random.split(jax.random.key(0), 2), jnp.float32(0.8))
    whole = benchmark_head.lattice(transition, params, logits, *rest, 10, vocabulary)
    parts = benchmark_head.scores_and_walk(
        transition, params, *benchmark_head.candidates_of(logits, 10), *rest, vocabulary)
    for a, b in zip(whole, parts):
        np.testing.assert_allclose(a, b, atol=1e-6)
    greedy = (*rest[:-1], jnp.float32(0))
    tokens, _ = benchmark_head.sequential(transition, params, logits, *greedy, vocabulary)
    np.testing.assert_array_equal(
        tokens, benchmark_head.lattice(transition, params, logits, *greedy, 10, vocabulary)[0])


def _rows(target, batch, start):
    return benchmark_decode.Rows(jnp.arange(3, 3 + batch), jnp.full(batch, start),
                                 jax.random.split(jax.random.key(0), batch), jnp.float32(0))


@pytest.mark.parametrize("execution, noise", [("lattice", 0.5), ("sequential", 0.0)])
def test_the_parts_of_a_round_are_the_round(execution, noise):
    target = tiny.target()
    drafter = tiny.drafter(target, noise)
    caches, rows = benchmark_decode.Caches(target, drafter, 4, 16), _rows(target, 4, 5)
    calls = benchmark_decode.round_programs(target, drafter, execution, caches, rows)
    accepted, following = calls["logits, rule"]()
    for _ in range(2):  # programs leave the caches as the next call needs them
        for whole, part in zip(calls["round"](), (accepted, following)):
            np.testing.assert_array_equal(whole, part)
        calls["verify"](), calls["commit"]()
    assert all(accepted == 3) == (not noise)


def test_a_plain_step_is_the_target():
    target = tiny.target()
    caches, rows = benchmark_decode.Caches(target, tiny.drafter(target), 2, 16), _rows(target, 2, 0)
    tokens = benchmark_decode.plain_programs(target, caches, rows)["plain step"]()
    np.testing.assert_array_equal(tokens, np.argmax(target.logits(rows.anchors[:, None])[:, 0], axis=-1))


def test_decoding_is_compared_with_what_was_predicted(monkeypatch):
    target, made = tiny.target(), []
    drafters = {T: tiny.drafter(target, block_length=T) for T in (2, 4)}

    def generate(target, drafter, prompts, max_new_tokens, stop_tokens=None, execution=None):
        """Rounds that accept 2 and 0 drafts by turns; an answer is prompt + 0, 1, 2, ..."""
        made.append((len(prompts), drafter and drafter.config.block_length, max_new_tokens, stop_tokens, execution))
        rounds = [2, 0] * 3 if drafter else []
        return ds.Result([[p[-1] + i for i in range(max_new_tokens)] for p in prompts], [rounds] * len(prompts), None)

    def replay(target, drafter, prompt, continuation, max_new_tokens):
        assert continuation == [prompt[-1] + i for i in range(13)]
        return ds.Result([continuation[:max_new_tokens]], [[drafter.config.block_length] * 3], None)

    def alternate(calls, repeats, description):
        """Answers of one token take 1 s; the longer ones 13 s, 7 s, 3 s and 4 s; batches 2 s and single runs 3 s."""
        assert repeats == 5
        for call in calls.values():
            call()
        longer = {("plain", None): 13.0, ("speculative", 2): 7.0, ("replayed", 2): 3.0, ("replayed", 4): 4.0}
        taken = {"first": 1.0, "batch": 2.0, "single": 3.0}
        return {(way, which): timing.summary([taken.get(which) or longer[way]]) for way, which in calls}

    monkeypatch.setattr(ds, "generate", generate)
    monkeypatch.setattr(timing, "alternate", alternate)
    monkeypatch.setattr(benchmark_decode, "replay", replay)
    prompts, cost = [[3, 4], [7]], {2: 1.25, 4: 2.5}
    rows = benchmark_decode.time_decoding(target, drafters, 2, "lattice", prompts, 13, cost, 5)
    modes = [(row["mode"], row["drafts"]) for row in rows]
    assert modes == [("plain", None), ("speculative", 2), ("replayed", 2), ("replayed", 4)]  # trained for two drafts
    plain, speculative, _, replayed = rows
    assert plain["tokens"] == 26 and plain["tokens_per_second"] == 26 / 26 and "ratio" not in plain
    assert plain["tokens_per_second_after_prompt"] == 24 / 24 and plain["accepted_length"] == 1.0
    assert speculative["ratio"] == 24 / 12 and speculative["accepted_length"] == 2.0 and speculative["identical"] == 2
    assert speculative["predicted_ratio"] == 2.0 / 1.25 and speculative["deviation"] == 2 / 1.6 - 1
    assert replayed["accepted_length"] == 5.0 and replayed["predicted_ratio"] == 2.0 and replayed["ratio"] == 4.0
    assert set(made) == {(1, None, 13, None, None), (1, None, 1, None, None), (1, 2, 13, None, "lattice"),
                         (1, 2, 1, None, "lattice")}

    made.clear()
    plain, speculative = benchmark_decode.time_batch(target, drafters[2], "lattice", prompts, 13, 5)
    assert (plain["drafts"], speculative["drafts"]) == (None, 2)
    assert speculative["tokens_per_second"] == 26 / 2 and speculative["ratio"] == 1.5
    assert made == [(2, None, 13, (), None), *[(1, None, 13, (), None)] * 2,
                    (2, 2, 13, (), "lattice"), *[(1, 2, 13, (), "lattice")] * 2]


def test_answers_of_one_token_cannot_be_timed():
    target = tiny.target()
    every = dataclasses.replace(target, config=dataclasses.replace(
        target.config, stop_tokens=tuple(range(target.config.vocab_size))))
    with pytest.raises(ValueError, match="every answer ends with its first token"):
        benchmark_decode.time_decoding(every, {}, 2, "sequential", [[3]], 13, {}, 1)


def test_weights_are_counted_once():
    target = tiny.target()
    total, table = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)), target.embedding().nbytes
    read = benchmark_decode.weight_bytes(target)
    assert read == {"plain step": total - table, "decoder": total - 2 * table, "logits, draw": table}
    params = {name: value for name, value in target.params.items() if name != "lm_head"}
    tied = dataclasses.replace(
        target, params=params, config=dataclasses.replace(target.config, tie_word_embeddings=True))
    assert benchmark_decode.weight_bytes(tied) == {
        "plain step": total - table, "decoder": total - 2 * table, "logits, draw": table}


TORCH = benchmark_train.torch_interpreter(os.environ.get("TORCH_PYTHON"))


@pytest.mark.skipif(TORCH is None, reason="needs PyTorch, the extra `torch`")
@pytest.mark.parametrize("layout,dtype,tolerance", [
    ("anchor_first", "float32", 1e-5), ("fill_in", "float32", 1e-5), ("anchor_first", "bfloat16", 1e-2)])
def test_the_pytorch_step_is_the_same_step(layout, dtype, tolerance):
    """`run` refuses to compare steps whose losses differ; they are equal to the precision of the dtype."""
    target = tiny.target()
    drafter = tiny.drafter(target)
    drafter = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, layout=layout))
    found = benchmark_train.run(target, drafter, drafts=3, anchors=5, repeats=1, budget=1, dtype=dtype,
                                torch_python=TORCH)
    losses = found["torch"]["losses"]
    np.testing.assert_allclose(losses["jax"], losses["torch"], rtol=tolerance)
    assert losses["jax"][-1] < losses["jax"][0] and found["torch_over_jax"] > 0


def test_what_pytorch_is_not_written_for_is_left_out():
    config = dataclasses.replace(tiny.drafter(tiny.target()).config, confidence=True)
    assert benchmark_train.not_in_torch(config) is None
    convolution = dataclasses.replace(config.backbone, conv_kernel_size=2)
    for change in ({"output_multiplier": 2.0}, {"backbone": convolution}):
        assert "it has no such" in benchmark_train.not_in_torch(dataclasses.replace(config, **change))
