"""The experiments' programs: rounds read off a known text, cells that are never mixed, the recipes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
import pairs
import program
from dspark_jax import union
from dspark_jax.checkpoints import conversions
from dspark_jax.data.documents import Documents
from experiments import block_lattices, cells, known_text, results, sampled_text, six, texts
from experiments.known_text import Way
from train import compile as compiling
from train import features, loop, plots

LENGTH = 40


@pytest.fixture(scope="module")
def target():
    return pairs.random_target(seed=2, vocab_size=24, tie_word_embeddings=False, head_spread=0.6)


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    """(prompt, greedy answer, features) without a stop token."""
    prompt = [3, 1, 4, 1, 5]
    answer = ds.generate(target, None, [prompt], max_new_tokens=LENGTH, stop_tokens=()).tokens[0]
    said = Documents.pack([([*prompt, *answer], [False] * 5 + [True] * len(answer), "")])
    rows, _ = features.compute(target, said, (0, 1), tmp_path_factory.mktemp("features")).of(0)
    return prompt, np.array(answer), rows[:, :2 * target.config.hidden_size]


def drafter_of(target, transition, **fields):
    return pairs.random_drafter(target, transition=transition, block_length=4, target_layer_ids=(0, 1), **fields)


@pytest.mark.parametrize("transition, way, options", [
    ("none", Way(), {"execution": "sequential"}),
    ("vanilla", Way(), {"execution": "sequential"}),
    ("joint", Way(3), {"execution": "lattice", "candidates": 3}),
    ("context", Way(1), {"execution": "lattice", "candidates": 1}),
    ("recurrent", Way(), {"execution": "sequential"}),
])
@pytest.mark.parametrize("draft_ids", [None, np.arange(2, 22)])
def test_rounds_of_a_known_text_are_those_of_decoding(target, text, transition, way, options, draft_ids):
    prompt, answer, rows = text
    drafter = drafter_of(target, transition, draft_ids=draft_ids)
    result = ds.generate(target, drafter, [prompt], max_new_tokens=LENGTH, stop_tokens=(), **options)
    assert result.tokens[0] == answer.tolist()
    assert max(result.accepted[0]) > 0  # or nothing would be tested
    drafted, anchors = draft(drafter, way, text)
    right = drafted == known_text.labels_of(answer, anchors, 4)
    assert known_text.rounds(right, LENGTH) == (result.accepted[0], result.proposed[0])


@pytest.mark.parametrize("way, options", [
    (Way(), {"execution": "sequential"}), (Way(3), {"execution": "lattice", "candidates": 3})])
def test_so_are_those_of_a_drafter_that_copies(target, text, way, options):
    prompt, answer, rows = text
    drafter = drafter_of(target, "joint", draft_ids=np.arange(2, 22), copy_length=2)
    drafter.params["copying"]["weight"] = jnp.array([4.0, 8.0])
    result = ds.generate(target, drafter, [prompt], max_new_tokens=LENGTH, stop_tokens=(), **options)
    drafted, anchors = draft(drafter, way, text)
    right = drafted == known_text.labels_of(answer, anchors, 4)
    assert known_text.rounds(right, LENGTH) == (result.accepted[0], result.proposed[0])
    without, _ = draft(conversions.without_copying(drafter), way, text)
    assert (without != drafted).sum() > 5
    with pytest.raises(ValueError, match="copied: None; allowed"):
        known_text.paths(drafter.config, way, drafter.params, drafter.draft_to_target, jnp.zeros((1, 4, 20)),
                         jnp.zeros((1, 4, 32)), jnp.zeros(1, jnp.int32))


def test_what_the_shipped_drafter_accepts_of_known_texts_is_what_decoding_accepts(tmp_path):
    out = tmp_path / "shipped.json"
    result = program.run("""
import json, runpy
import dspark_jax as ds, tiny
from dspark_jax.data import sources
target = tiny.target()
drafter = tiny.drafter(target, noise=1.0, copy_length=4)
ds.load_target, ds.load_drafter = lambda where: target, lambda where, target: drafter
decoded = {}
for name in sources.EVALUATION_SOURCES:
    prompts = [target.tokenizer.chat(prompt.messages) for prompt in sources.evaluation_prompts(name, 2)]
    accepted = sum(ds.generate(target, drafter, prompts, max_new_tokens=24).accepted, [])
    decoded[name] = 1 + sum(accepted) / len(accepted)
print(json.dumps(decoded), flush=True)
runpy.run_module("experiments.shipped", run_name="__main__")
""", f"--workdir={tmp_path}", f"--out={out}", "--count=2", "--max_new_tokens=24", "--block_lengths=2,3")
    assert result.returncode == 0, result.stderr
    decoded, found = json.loads(result.stdout.splitlines()[0]), json.loads(out.read_text())
    assert found["3 drafts"]["drafter"] == pytest.approx(decoded)
    for drafts in "2 drafts", "3 drafts":
        lengths = found[drafts]
        assert all(lengths["better of both"][name] >= lengths["drafter"][name] for name in decoded)


def draft(drafter, way, text, successors=None):
    prompt, answer, rows = text
    anchors = np.arange(LENGTH - 1)
    base, hidden = known_text.heads(
        drafter.config, drafter.params, drafter.embedding, drafter.head_rows, jnp.asarray(rows),
        jnp.array([*prompt, *answer]), jnp.asarray(len(prompt) + anchors))
    copied = known_text.copied(drafter.config, drafter.params, drafter.draft_to_target, hidden, jnp.array([*prompt, *answer]),
                               jnp.asarray(len(prompt) + anchors))
    return np.asarray(known_text.paths(drafter.config, way, drafter.params, drafter.draft_to_target, base, hidden,
                                       jnp.asarray(answer[anchors]), successors, copied)), anchors


def test_a_union_of_everything_is_sequential(target, text):
    drafter = drafter_of(target, "vanilla")
    table = union.successor_table(drafter.params["transition"], 23)
    np.testing.assert_array_equal(draft(drafter, Way(1, 23), text, table)[0], draft(drafter, Way(), text)[0])


def test_rounds_end_with_the_text():
    right = np.array([[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    # Anchor 0: three drafts and the target's own token; anchor 4 has one token left, which is accepted, and no bonus.
    assert known_text.rounds(right, 6) == ([3, 1], [3, 1])
    assert known_text.rounds(right[2:], 4) == ([0, 2], [3, 2])


def test_labels_and_ranks():
    assert known_text.labels_of([5, 6, 7], [0, 1], 3).tolist() == [[6, 7, -1], [7, -1, -1]]
    base = jnp.array([[[0.0, 3.0, 1.0, 2.0]] * 3])
    assert known_text.ranks(base, jnp.array([[1, 0, -1]])).tolist() == [[0, 3, 4]]


class Letters:
    def decode(self, tokens, control_tokens):
        return "".join(chr(97 + token) for token in tokens)


def test_a_picture_shows_what_decoding_does(target, text, tmp_path):
    prompt, answer, _ = text
    target = dataclasses.replace(target, tokenizer=Letters())
    drafter = drafter_of(target, "joint", draft_ids=np.arange(2, 22))
    lattices = block_lattices.Lattices(target, drafter, prompt, answer, 5)
    drafted, anchors = draft(drafter, Way(5), text)
    for at in anchors[:-4]:
        np.testing.assert_array_equal(lattices.drafted(at), drafted[at])
    at = max(range(len(answer) - 4), key=lattices.accepted)
    assert lattices.accepted(at) > 0
    shown = lattices.picture(at, 3)
    assert np.shape(shown["candidates"]) == (4, 3) and shown["transitions"].shape == (3, 3, 3)
    walked = [texts[slot] for texts, slot in zip(shown["candidates"], shown["slots"])]
    assert walked == [chr(97 + token) for token in drafted[at]]
    assert walked[:shown["accepted"]] == shown["said"][:shown["accepted"]]
    # Behind the walked predecessor the walked token is the likeliest, and its share is the one on its line.
    for t, slot in enumerate(shown["slots"]):
        assert shown["probabilities"][t, slot] == shown["probabilities"][t].max()
        if t:
            assert shown["transitions"][t - 1, shown["slots"][t - 1], slot] == shown["probabilities"][t, slot]
    plots.lattice_diagram(tmp_path / "a.png", **shown, title="one")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------------------------------- cells

STAMP = {"data": "d", "target": "t", "library": "l", "method": "m"}


def test_cells_are_kept_and_found_missing(tmp_path):
    found = cells.Cells(tmp_path / "new" / "a.json", STAMP)
    assert found.missing(["x", "y"]) == ["x", "y"]
    found.put("x", {"drafter": "one", "rounds": [1, 2]})
    again = cells.Cells(tmp_path / "new" / "a.json", STAMP)
    assert again.missing(["x", "y"], "one") == ["y"] and again.found["x"]["rounds"] == [1, 2]
    assert cells.read(tmp_path / "new" / "a.json") == (STAMP, again.found)


@pytest.mark.parametrize("name", cells.STAMP)
def test_cells_of_other_versions_are_not_mixed(tmp_path, name):
    cells.Cells(tmp_path / "a.json", STAMP).put("x", {})
    before = (tmp_path / "a.json").read_bytes()
    with pytest.raises(ValueError, match=f"a.json: its cells were measured with {name} {STAMP[name]}, and now it is other"):
        cells.Cells(tmp_path / "a.json", STAMP | {name: "other"})
    assert (tmp_path / "a.json").read_bytes() == before


def test_cells_of_another_drafter_are_refused(tmp_path):
    found = cells.Cells(tmp_path / "a.json", STAMP)
    found.put("x", {"drafter": "one"})
    with pytest.raises(ValueError, match="cell 'x' is of drafter one, and now it is two"):
        found.missing(["x"], "two")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stamp": {}, "cells": {}}', '{"stamp": {"data": 1}, "cells": 3}'])
def test_damaged_cells(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="a.json: no file of cells"):
        cells.Cells(tmp_path / "a.json", STAMP)


def test_code_hash_is_of_what_the_code_does(tmp_path):
    def of(text):
        (tmp_path / "a.py").write_text(text)
        return cells.code_hash([tmp_path / "a.py"])

    whole = of('"""One."""\ndef f(x):\n    """Two."""\n    return x + 1  # three\n')
    assert of("def f(x):\n    return (x +\n        1)\n") == whole
    assert of("def f(x):\n    return x + 2\n") != whole


def test_drafter_hash_does_not_depend_on_how_it_is_run(target):
    drafter = drafter_of(target, "vanilla")
    other = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, block_length=2, candidates=3))
    assert cells.drafter_hash(drafter) == cells.drafter_hash(other)
    changed = jax.tree.map(lambda a: a, drafter.params)
    changed["transition"]["predecessor"] = changed["transition"]["predecessor"].at[0, 0].add(1)
    assert cells.drafter_hash(dataclasses.replace(drafter, params=changed)) != cells.drafter_hash(drafter)


def test_bootstrap():
    rng = np.random.default_rng(0)
    rounds = rng.integers(20, 60, 400)
    committed = rng.binomial(rounds, 0.5) + rounds
    mean, low, high = results.bootstrap([(committed, rounds)])
    assert mean == committed.sum() / rounds.sum()
    # The standard error of the share of 400 * 40 coins is 0.004; half of the interval is twice that.
    assert low < mean < high and 0.006 < (high - low) / 2 < 0.010


# ------------------------------------------------------------------------------------------------------------- recipes


def model_of(config):
    return loop.drafter_config(config.drafter, compiling.target_config(config))


def test_the_six_differ_in_their_heads_alone():
    configs = {name: six.get_config(name) for name in six.SIX}
    models = {name: model_of(config) for name, config in configs.items()}
    assert {name: model.transition for name, model in models.items()} == six.TRANSITIONS
    for name, model in models.items():
        same = {"transition": "vanilla", "execution": "sequential"}
        assert dataclasses.replace(model, **same, backbone=models["vanilla"].backbone) == models["vanilla"]
        assert dataclasses.replace(model.backbone, conv_kernel_size=0) == models["vanilla"].backbone
        assert bool(model.backbone.conv_kernel_size) == (name == "selector")
        for section in ("steps", "seed", "data", "batch", "optimizer", "features"):
            assert configs[name][section] == configs["vanilla"][section], section
        if name != "selector":
            assert configs[name].loss == configs["vanilla"].loss


def test_the_backbone_and_long_fit_the_six():
    vanilla, long = (model_of(six.get_config(name)) for name in ("vanilla", "long"))
    assert model_of(six.get_config("backbone")) == model_of(six.get_config("none"))
    assert dataclasses.replace(long, block_length=vanilla.block_length) == vanilla
    with pytest.raises(ValueError, match="six.py:other: unknown; allowed: backbone, long, none, vanilla"):
        six.get_config("other")


# ------------------------------------------------------------------------------------------------------------- results


def made_up():
    """Cells of two prompts a set: the lattice of M candidates accepts M / (M + 4) of what sequential drafting does."""
    greedy = {}
    for s in results.SETS:
        for name in six.SIX:
            gain = {"none": 0, "vanilla": 40}.get(name, 20)
            ways = {"sequential": gain, "lattice 16": gain} | (
                {f"{kind} {M}": gain * M // (M + 4) for M in results.COUNTS for kind in ("lattice", "union")}
                if name in results.SWEPT else {})
            for way, more in ways.items():
                greedy[f"{name}/{s}/{way}"] = {
                    "drafter": name, "committed": [150 + more, 250 + more], "rounds": [100, 200],
                    "reached": [300, 100], "accepted": [100, 2 * more]}
            greedy[f"{name}/{s}/ranks"] = {"recall": {"16": [0.5] * 7}, "oracle": {"16": 2.5, "1": 1.25}}
        for T in results.BLOCKS:
            greedy[f"long/{s}/sequential T={T}"] = greedy[f"none/{s}/sequential"]
    return results.Results(greedy=greedy)


def test_tables_of_results():
    found = made_up()
    length, low, high = found.length("greedy", "vanilla", "sequential")
    assert length == pytest.approx(480 / 300) and low < length < high
    assert found.acceptance("greedy", "vanilla", "sequential") == pytest.approx([1 / 3, 0.8])
    rows = results.of_drafters(found, "greedy")
    assert [row[0] for row in rows[1:]] == list(results.TITLES.values())
    assert rows[2][-4:] == ["1.600", rows[2][-3], "+20.0 %", "+80.0 %"] and rows[1][-2:] == ["", ""]
    assert results.head_room(found)[2][-4:] == ["1.250", "1.547", "2.500", "24 %"]
    assert not found.missing  # so far nothing else was asked for
    assert results.loses_at_most(found, "vanilla") is None and results.loses_at_most(found, "vanilla", 0.05) == 16
    text = results.markdown(results.implication_2(found, "vanilla"))
    assert text.splitlines()[1].count("---") == 9 and "| 64 | 1.580 | -1.3 % | 1.580 | -1.3 % | - |" in text
    assert "times: vanilla/lattice 64" in found.missing


def test_missing_cells_are_named():
    found = results.Results()
    assert found.length("greedy", "vanilla", "sequential") is None
    assert found.missing == [f"greedy: vanilla/{s}/sequential" for s in results.SETS]
    assert results.loses_at_most(found, "vanilla") is None
    assert results.of_drafters(found, "greedy")[1][1:] == ["-"] * 5 + ["", ""]


def test_files_of_different_versions_make_no_table(tmp_path):
    cells.Cells(tmp_path / "greedy.json", STAMP).put("x", {})
    cells.Cells(tmp_path / "times.json", STAMP).put("y", {})
    assert results.Results.read(tmp_path).times == {"y": {}}
    cells.Cells(tmp_path / "sampled.json", STAMP | {"library": "other", "data": "new"}).put("z", {})
    with pytest.raises(ValueError, match="greedy.json and sampled.json were measured with different data and library"):
        results.Results.read(tmp_path)


# ------------------------------------------------------------------------------------------------------- sampled texts


def test_expected_rounds_are_those_of_simulated_ones():
    """Each draft is accepted or not by the toss of a coin, many times."""
    rng = np.random.default_rng(0)
    length, T, draws = 12, 3, 40_000
    accept = rng.uniform(0.2, 1.0, (length - 1, T))
    rounds, committed, reached, accepted = sampled_text.expected_rounds(sampled_text.survival(accept), length)
    sums = {"rounds": 0, "committed": 0, "reached": np.zeros(T), "accepted": np.zeros(T)}
    for right in rng.random((draws, length - 1, T)) < accept:
        took, proposed = known_text.rounds(right, length)
        counted = results.summary([(took, proposed)], T)
        sums["rounds"] += counted["rounds"][0]
        sums["committed"] += counted["committed"][0]
        sums["reached"] += counted["reached"]
        sums["accepted"] += counted["accepted"]
    for name, expected in (("rounds", rounds), ("committed", committed), ("reached", reached), ("accepted", accepted)):
        np.testing.assert_allclose(np.asarray(sums[name]) / draws, expected, rtol=0.01, err_msg=name)


def test_survival():
    ratios = np.array([[0.5, 4.0, 0.25], [2.0, 0.25, 3.0]])
    np.testing.assert_allclose(sampled_text.survival(ratios), [[1, 0.5, 0.5, 0.125], [1, 1, 0.25, 0.25]])
    np.testing.assert_allclose(sampled_text.survival(ratios, "block"), [[1, 0.5, 0.5, 0.5], [1, 1, 0.5, 0.5]])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("transition, M", [("joint", 5), ("recurrent", 0)])
def test_sampled_texts_have_the_rounds_of_decoding(target, transition, M, rule):
    """Speculative sampling, many times, against what its own texts say: both have the same mean."""
    drafter, N, length = drafter_of(target, transition, draft_ids=np.arange(1, 23)), 400, 14
    prompt = [3, 1, 4, 1, 5]
    options = {"execution": "lattice", "candidates": M} if M else {"execution": "sequential"}
    result = ds.generate(target, drafter, [prompt] * N, max_new_tokens=length, temperature=1.0, stop_tokens=(),
                         verification=rule, **options)
    to_draft = np.asarray(loop.inverse(drafter.draft_to_target, 24))
    expected, anchors = [], np.arange(length - 1)
    at = np.minimum(anchors[:, None] + np.arange(4), length - 1)
    for answer in map(np.array, result.tokens[:200]):
        tokens = jnp.array([*prompt, *answer])
        rows = features.rows_of(target.config, target.params, tokens[None], (0, 1))[0, :, :2 * target.config.hidden_size]
        base, hidden = known_text.heads(drafter.config, drafter.params, drafter.embedding, drafter.head_rows, rows, tokens,
                                        len(prompt) + jnp.asarray(anchors))
        labels = known_text.labels_of(answer, anchors, 4)
        log_p = texts.log_p_of(target, np.array(tokens))[len(prompt):]
        ratios = sampled_text.ratios(
            drafter.config, M, drafter.params, base, hidden, jnp.asarray(answer[at]),
            jnp.asarray(np.where(labels < 0, -1, to_draft[labels])), jnp.asarray(log_p[np.minimum(at + 1, length - 1)]))
        expected.append(sampled_text.expected_rounds(sampled_text.survival(ratios, rule), length)[0])
    real = np.array([len(row) for row in result.accepted])
    error = np.sqrt(real.var() / len(real) + np.var(expected) / len(expected))
    assert abs(real.mean() - np.mean(expected)) < 3.5 * error
    assert error < 0.03 * real.mean() and real.mean() < 0.9 * (length - 1)  # or it would say little


def test_the_laws_of_a_text(target):
    tokens = np.array([3, 1, 4, 1, 5, 9, 2])
    log_p = texts.log_p_of(target, tokens)
    expected = jax.nn.log_softmax(target.logits(jnp.asarray(tokens[None]))[0])
    assert log_p[0] == 0 and log_p.shape == tokens.shape
    np.testing.assert_allclose(log_p[1:], [expected[i, token] for i, token in enumerate(tokens[1:])], rtol=1e-4)


def test_the_committed_tables_are_those_of_the_committed_cells():
    done = program.run_module("experiments.tables")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (cells.ROOT / "experiments/RESULTS.md").read_text() + "\n"
