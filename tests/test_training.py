"""Training: a run that was killed ends like one that was not. Features, batches, first tables, drafter files."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
from flax import traverse_util

import dspark_jax as ds
import pairs
import tiny_run
from dspark_jax import loading
from dspark_jax import target as target_lib
from dspark_jax.checkpoints import huggingface
from dspark_jax.checkpoints.safetensors_files import write_file
from dspark_jax.data.documents import Documents
from dspark_jax.data.target_cache import TargetCache, check_fits
from train import batches, bigram, features, loop, objective

ROOT = pathlib.Path(__file__).parents[1]


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tiny.npz"
    tiny_run.write_tokens(path)
    return path


@pytest.fixture(scope="module")
def run(tokens, tmp_path_factory):
    """An uninterrupted run: (its directory, the drafter it returned)."""
    workdir = tmp_path_factory.mktemp("run")
    return workdir, loop.train(tiny_run.config(tokens), workdir, tiny_run.target())


@pytest.mark.slow
def test_loss_falls(run):
    workdir, _ = run
    steps = lines(workdir)
    assert [s["step"] for s in steps] == list(range(1, tiny_run.STEPS + 1))
    mean = lambda name, part: np.mean([s[name] for s in part])
    assert mean("loss", steps[-5:]) < 0.8 * mean("loss", steps[:5])
    assert mean("expected_accepted_length", steps[-5:]) > mean("expected_accepted_length", steps[:5])
    assert all(len(s["accept_rate"]) == 3 and np.isfinite(s["loss"]) for s in steps)
    assert all(s["gradient_norm"] > 0 and s["positions_per_second"] > 0 for s in steps)
    evaluated = [s["step"] for s in steps if "path_accuracy" in s]
    assert evaluated == [1, 11, 21] and all(len(steps[i - 1]["candidate_recall"]) == 3 for i in evaluated)
    assert list((workdir / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_killed_run_ends_like_one_that_was_not(run, tokens, tmp_path):
    """SIGKILL between two checkpoints, then the same command again: the same final parameters, bit for bit."""
    workdir = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "tests" / "tiny_run.py"), str(workdir), str(tokens)]
    start = lambda *more: subprocess.run(
        [*command, *more], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert start("18").returncode == -signal.SIGKILL
    assert [s["step"] for s in lines(workdir)] == list(range(1, 19))
    steps = {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()}
    assert steps and steps <= {5, 10, 15}
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write('{"step": 19, "lo')  # and the machine died in the middle of a line
    finished = start()
    assert finished.returncode == 0, finished.stderr
    assert [s["step"] for s in lines(workdir)] == list(range(1, tiny_run.STEPS + 1))
    uninterrupted, drafter = run
    killed = ds.load_drafter(workdir, tiny_run.target())
    assert killed.config == drafter.config
    same_params(killed.params, drafter.params)
    timeless = lambda steps: [{k: v for k, v in s.items() if k != "positions_per_second"} for s in steps]
    assert timeless(lines(workdir)) == timeless(lines(uninterrupted))


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_packed_chat_data_trains(tokens, tmp_path, capsys, cached):
    """Rows of JSON lines, packed into rows that hold several: read, reported, trained on."""
    documents, file = Documents.load(tokens), tmp_path / "chat.jsonl"
    rows = [dict(zip(("input_ids", "loss_mask"), (a.astype(int).tolist() for a in documents.document(i))))
            for i in range(len(documents))]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"input_ids": [3], "loss_mask": [1]}]))
    config = tiny_run.config(file)
    config.steps, config.optimizer.warmup_steps, config.data.row_length, config.batch.sequences = 12, 1, 100, 2
    config.features.cached = cached
    loop.train(config, tmp_path / "run", tiny_run.target())
    out = capsys.readouterr().out
    assert f"{file}: {len(documents)} documents" in out
    assert "dropped: 1 rows with fewer than 2 tokens, the first in line 25" in out
    steps = lines(tmp_path / "run")
    assert len(steps) == 12 and all(np.isfinite(s["loss"]) and s["blocks"] > 0 for s in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.slow
def test_finished_run_is_not_trained_again(run, tokens):
    workdir, drafter = run
    before = (workdir / "metrics.jsonl").read_text()
    again = loop.train(tiny_run.config(tokens), workdir, tiny_run.target())
    same_params(again.params, drafter.params)
    assert (workdir / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_another_config_in_the_same_directory_is_refused(run, tokens):
    workdir, _ = run
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    config = tiny_run.config(tokens)
    config.optimizer.lr = 2e-2
    config.seed = 4
    with pytest.raises(ValueError) as error:
        loop.train(config, workdir, tiny_run.target())
    message = str(error.value)
    assert message.startswith(f"{workdir / 'config.json'}: this run was started with another config")
    assert "optimizer.lr: 0.01 there, 0.02 now; seed: 3 there, 4 now" in message and "\n" not in message
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


def test_damaged_config_of_a_run(tokens, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"seed": 3, "st')
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError) as error:
        loop.train(tiny_run.config(tokens), tmp_path, tiny_run.target())
    assert str(error.value).startswith(f"{file}: not JSON") and "\n" not in str(error.value)
    assert file.read_text() == '{"seed": 3, "st'


@pytest.mark.slow
def test_load_run_directory(run):
    workdir, drafter = run
    target = tiny_run.target()
    loaded = ds.load_drafter(workdir, target)
    assert loaded.config == drafter.config
    same_params(loaded.params, drafter.params)
    np.testing.assert_array_equal(loaded.draft_to_target, drafter.draft_to_target)
    np.testing.assert_array_equal(loaded.head_rows, target.head_rows()[loaded.draft_to_target])
    tokens = ds.generate(target, loaded, [[4, 2, 3]], max_new_tokens=12, stop_tokens=[]).tokens[0]
    best = np.argmax(target.logits(np.array([[4, 2, 3, *tokens]]))[0], axis=-1)
    assert best[2:-1].tolist() == tokens


@pytest.mark.slow
def test_damaged_run_directory(run, tmp_path):
    workdir, _ = run
    copy, target = tmp_path / "run", tiny_run.target()
    shutil.copytree(workdir, copy)
    file = copy / "drafter.json"
    whole = file.read_text()
    for text, message in [(whole[:50], ""), ("[1]", "'config'"), ("{}", "'config'"),
                          (whole.replace('"rank"', '"rnak"'), "rnak")]:
        file.write_text(text)
        with pytest.raises(ValueError) as error:
            ds.load_drafter(copy, target)
        assert str(file) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)
    file.write_text(whole)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ValueError, match="no complete checkpoint") as error:
        ds.load_drafter(copy, target)
    assert str(copy) in str(error.value)


@pytest.mark.parametrize("section, field, value, message", [
    ("drafter", "transition", "markov", "transition: unknown name 'markov'"),
    ("drafter", "transition_init", "svd", "drafter.transition_init: 'svd'; allowed: 'bigram', 'normal'"),
    ("drafter", "target_layer_ids", (0, 2), "target_layer_ids: (0, 2); the target's layers are 0..1"),
    ("drafter", "rank", 20, "rank: 20; must lie in [1, 19]"),
    ("optimizer", "warmup_steps", 30, "optimizer.warmup_steps: 30; must lie in [0, steps = 30)"),
    ("batch", "sequences", 25, "batch.sequences: 25; must lie in [1, 24]"),
    ("batch", "micro_steps", 3, "batch.micro_steps: 3; must divide batch.sequences, 4"),
    ("batch", "anchors_per_chunk", 0, "batch.anchors_per_chunk: 0; must be at least 1"),
    ("loss", "position_weights", "linear", "loss.position_weights: unknown name 'linear'; allowed: decay, adaptive"),
    ("data", "row_length", 39, "data.row_length: 39; must be at least data.max_length, 40"),
    ("data", "source_weights", {"gsm8k": 0.0, "chat": 0.0}, "batch.sequences: 4; must lie in [1, 0]"),
])
def test_bad_training_config(tokens, tmp_path, section, field, value, message):
    config = tiny_run.config(tokens)
    config[section][field] = value
    with pytest.raises(ValueError) as error:
        loop.train(config, tmp_path, tiny_run.target())
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "checkpoints").exists()  # so the mistake can be put right in the same directory
    assert field in ("rank", "transition_init") or not (tmp_path / "features").exists()  # before the long work


@pytest.mark.parametrize("field, value, message", [
    ("log_every", 0, "log_every: 0; must be at least 1"),
    ("checkpoint_keep", 0, "checkpoint_keep: 0; must be at least 1"),
    ("checkpoint_keep_every", 0, "checkpoint_keep_every: 0; must be at least 1"),
    ("evaluation.every", -1, "evaluation.every: -1; must be at least 0"),
    ("profile", "7:5", "profile: '7:5'; must be a number of steps"),
])
def test_bad_options_of_a_run(tokens, tmp_path, field, value, message):
    config = tiny_run.config(tokens)
    config.update_from_flattened_dict({field: value})
    with pytest.raises(ValueError) as error:
        loop.train(config, tmp_path, tiny_run.target())
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "features").exists()


def test_bigram_start_without_tables(tokens, tmp_path):
    config = tiny_run.config(tokens)
    config.drafter.transition, config.drafter.confidence = "none", False
    with pytest.raises(ValueError, match="drafter.transition_init: 'bigram'"):
        loop.train(config, tmp_path, tiny_run.target())


def test_draft_vocabulary():
    ids = loop.most_frequent(np.array([5, 5, 2, 2, 7, 1, 1, 1]), 9, 3)
    assert ids.tolist() == [1, 2, 5]  # of 2 and 5, equally frequent, both; 0 would be the next, before 7
    assert loop.most_frequent(np.array([7, 7, 3]), 9, 4).tolist() == [0, 1, 3, 7]
    assert loop.most_frequent(np.array([1]), 9, 9) is None and loop.most_frequent(np.array([1]), 9, None) is None
    assert loop.inverse(ids, 9).tolist() == [-1, 0, 1, -1, -1, 2, -1, -1, -1]
    assert loop.inverse(None, 4).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ features


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return Documents.pack([(rng.integers(0, tiny_run.VOCABULARY, n), np.arange(n) > n // 3, "")
                           for n in (9, 30, 1, 70, 12, 9, 64)])


class Stop(Exception):
    pass


def bits(cached, documents):
    """All that is stored of them, as integers."""
    rows, norms = zip(*[cached.of(i) for i in range(len(documents))])
    return np.concatenate(rows).view(np.uint16), np.concatenate(norms).view(np.uint32)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_features_equal_the_forward(documents, tmp_path):
    """And lie there as a target cache of DeepSpec's format, which fits the target."""
    target, taps = tiny_run.target(), (-1, 1)
    cached = features.compute(target, documents, taps, tmp_path, "some/target", batch=3)
    cache = TargetCache(tmp_path)
    check_fits(cache, target)
    assert cache.target == "some/target" and cache.target_layer_ids == taps and cache.final_normed
    for i in range(len(documents)):
        sequence, mask = documents.document(i)
        padded = jnp.asarray(np.pad(sequence.astype(np.int32), (0, 70 - len(sequence)))[None])
        hidden, tapped = target_lib.forward(target.config, target.params, padded, taps)
        expected = np.concatenate([*tapped, hidden], axis=-1)[0, :len(sequence)]
        rows, norms = cached.of(i)
        assert rows.dtype == ml_dtypes.bfloat16
        rows = rows.astype(np.float32)
        np.testing.assert_allclose(rows, expected, rtol=2**-8, atol=1e-5)  # half a unit in the last place is 2^-9
        logits = rows[:, -target.config.hidden_size:].astype(np.float64) @ np.float64(target.head_rows()).T
        np.testing.assert_allclose(norms, np.log(np.sum(np.exp(logits), axis=-1)), rtol=1e-5)
        np.testing.assert_array_equal(cache[i].input_ids, sequence)
        np.testing.assert_array_equal(cache[i].loss_mask, mask)
        assert cache[i].attention_mask.all()
    found = features.documents_of(cache)
    for name in ("tokens", "loss_mask", "length"):
        np.testing.assert_array_equal(getattr(found, name), getattr(documents, name))


def test_interrupted_features_go_on(documents, tmp_path):
    target, taps = tiny_run.target(), (0, 1)
    whole = bits(features.compute(target, documents, taps, tmp_path / "whole", batch=2), documents)

    def stop_after_two(done, total):
        assert total == len(documents)
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        features.compute(target, documents, taps, tmp_path / "parts", batch=2, progress=stop_after_two)
    with pytest.raises(FileNotFoundError, match="manifest.json"):  # it is no cache yet
        TargetCache(tmp_path / "parts")
    seen = []
    parts = features.compute(target, documents, taps, tmp_path / "parts", batch=2,
                             progress=lambda done, total: seen.append(done))
    assert seen == [6, 7]  # nothing is computed twice
    assert_same(bits(parts, documents), whole)
    again = features.compute(target, documents, taps, tmp_path / "parts",
                             progress=lambda *_: pytest.fail("computed again"))
    assert_same(bits(again, documents), whole)
    names = [file.name for file in sorted((tmp_path / "parts").iterdir())]
    assert names == ["log_normalizers.bin", "manifest.json", "samples.idx", "shard-00000.bin"]


def test_features_of_something_else_are_refused(documents, tmp_path):
    target = tiny_run.target()
    features.compute(target, documents, (0, 1), tmp_path)
    other = pairs.random_target(seed=9, vocab_size=tiny_run.VOCABULARY, tie_word_embeddings=False)
    unmasked = dataclasses.replace(documents, loss_mask=np.zeros_like(documents.loss_mask))
    for arguments, differs in [((target, documents, (-1, 1)), "target_layer_ids"),
                               ((target, documents.first(6), (0, 1)), "num_samples"),
                               ((other, documents, (0, 1)), "fingerprint"), ((target, unmasked, (0, 1)), "fingerprint")]:
        with pytest.raises(ValueError) as error:
            features.compute(*arguments, tmp_path)
        assert str(tmp_path) in str(error.value) and differs in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("done", [4, 7])
@pytest.mark.parametrize("name, text", [
    ("manifest.json", "{"), ("manifest.json", "[]"), ("shard-00000.bin", "short"), ("shard-00000.bin", None),
    ("log_normalizers.bin", None)])
def test_damaged_features(documents, tmp_path, name, text, done):
    """A manifest that can't be read is an error that names it; rows that are not all there are computed again, also
    where that is stopped in its midst."""
    target, taps = tiny_run.target(), (0, 1)
    whole = bits(features.compute(target, documents, taps, tmp_path, batch=4), documents)
    file = tmp_path / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    if name == "manifest.json":
        with pytest.raises(ValueError) as error:
            features.compute(target, documents, taps, tmp_path)
        assert str(file) in str(error.value) and "\n" not in str(error.value)
        return

    def stop(now, total):
        if now == done < total:
            raise Stop

    with pytest.raises(Stop) if done < 7 else contextlib.nullcontext():
        features.compute(target, documents, taps, tmp_path, batch=4, progress=stop)
    assert_same(bits(features.compute(target, documents, taps, tmp_path, batch=4), documents), whole)


def test_features_of_other_programs(tokens, tmp_path):
    """A run on a cache that says what ours does ends with the same parameters. One on speculators' files, whose last states
    are rounded before they are normed, and which lack the log-normalisers that a reduced draft vocabulary needs, begins
    with nearly the same loss, also where documents are left out."""
    target, documents, taps = tiny_run.target(), Documents.load(tokens), (0, 1)
    features.compute(target, documents, taps, tmp_path / "cache")
    (tmp_path / "files").mkdir()
    for i in range(len(documents)):
        ids = documents.document(i)[0].astype(np.int64)
        _, states = target_lib.forward(target.config, target.params, jnp.asarray(ids[None]), (0, 1, 1))
        states = np.stack([state[0] for state in states], axis=1).astype(ml_dtypes.bfloat16)
        write_file(tmp_path / f"files/hs_{i}.safetensors", {"token_ids": ids, "hidden_states": states})
    deepspec = {"made_by": "deepspec", "directory": str(tmp_path / "cache")}
    speculators = {"made_by": "speculators", "directory": str(tmp_path / "files"), "layer_ids": (1, 2), "layer_id_base": 1,
                   "final_normed": False}

    def trained(name, made_by, steps, vocabulary, weights):
        config = tiny_run.config(tokens)
        config.steps, config.drafter.draft_vocab_size, config.drafter.transition_init = steps, vocabulary, "normal"
        config.data.source_weights, config.optimizer.warmup_steps = weights, 0
        config.features.update(made_by)
        config.data.tokens = None if made_by is deepspec else str(tokens)
        params = loop.train(config, tmp_path / name, target).params
        return params, lines(tmp_path / name)[0]["loss"]

    ours, _ = trained("ours", {}, 6, tiny_run.VOCABULARY, {})
    same_params(trained("deepspec", deepspec, 6, tiny_run.VOCABULARY, {})[0], ours)
    _, some = trained("some of ours", {}, 1, 20, {"chat": 0.0})
    assert abs(trained("some of speculators", speculators, 1, 20, {"chat": 0.0})[1] - some) < 1e-2


FEATURES = {  # of a config's section: what is said of it
    "made_by": ({"made_by": "me"}, "features.made_by: 'me'; allowed: 'deepspec', 'speculators'"),
    "online": ({"made_by": "deepspec", "cached": False}, "features.cached: False"),
    "directory": ({"made_by": "deepspec"}, "features.directory: None"),
    "tokens": ({"made_by": "deepspec", "directory": "here"}, "data.tokens"),
    "base": ({"made_by": "speculators", "directory": "here", "layer_ids": (1, 2), "final_normed": False},
             "features.layer_id_base: None"),
    "needless": ({"layer_id_base": 1}, "features.layer_id_base: 1"),
}


@pytest.mark.parametrize("case", FEATURES)
def test_features_sections_that_contradict_themselves(case, tokens, tmp_path):
    fields, message = FEATURES[case]
    config = tiny_run.config(tokens)
    config.features.update(fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        loop.train(config, tmp_path, tiny_run.target())


def test_features_of_other_layers(documents, tokens, tmp_path):
    target, config = tiny_run.target(), tiny_run.config(tokens)
    features.compute(target, documents, (-1, 1), tmp_path / "cache")
    config.features.update(made_by="deepspec", directory=str(tmp_path / "cache"))
    config.data.tokens = None
    with pytest.raises(ValueError, match=re.escape("drafter.target_layer_ids: [0, 1]; the features in")):
        loop.train(config, tmp_path / "run", target)


def test_online_equals_cached(tokens, tmp_path):
    """The same step with the target inside and with stored features: equal but for bfloat16 rounding."""
    target, config = tiny_run.target(), tiny_run.config(tokens)
    model = loop.drafter_config(config.drafter, target.config)
    taps = tuple(config.drafter.target_layer_ids)
    drafter = pairs.random_drafter(target, draft_ids=np.arange(20), block_length=3)
    model = dataclasses.replace(drafter.config, target_layer_ids=taps)
    rng = np.random.default_rng(0)
    documents = Documents.pack([(rng.integers(0, tiny_run.VOCABULARY, n), np.arange(n) >= first, "")
                                for n, first in ((40, 4), (25, 5), (33, 3), (40, 6))])
    cached = features.compute(target, documents, taps, tmp_path)
    frozen = {"embedding": drafter.embedding, "head_rows": drafter.head_rows, "target_head": target.head_rows(),
              "target_to_draft": loop.inverse(np.arange(20), tiny_run.VOCABULARY), "target": target.params}
    optimizer = objective.make_optimizer(config.optimizer, config.steps)
    results = []
    for online, given in ((None, cached.of), ((target.config, taps), None)):
        batch = batches.assemble(documents, given, [0, 1, 2, 3], 40, 40)
        batch = {name: jnp.asarray(a) for name, a in batch.items() if a is not None}
        assert ("features" in batch) == (online is None)
        step = jax.jit(objective.make_step(
            model, objective.loss_weights(config.loss), optimizer, anchors=6, online=online))
        results.append(step(drafter.params, optimizer.init(drafter.params), frozen, batch, jax.random.key(1), 0))
    (_, _, stored), (_, _, computed) = results
    for name in stored:
        np.testing.assert_allclose(stored[name], computed[name], rtol=1e-2, atol=1e-3, err_msg=name)


# ------------------------------------------------------------------------------------------------ what a run begins with


def beginning(tokens, **drafter_fields):
    """(config, what `loop.starting_drafter` takes) of a tiny run whose drafter differs by these fields."""
    config, target = tiny_run.config(tokens), tiny_run.target()
    config.drafter.update(drafter_fields)
    data = Documents.load(tokens)
    return config, (loop.drafter_config(config.drafter, target.config), target, data,
                    [data.document(i)[0] for i in range(len(data))])


def save_start(tokens, where, **drafter_fields):
    config, arguments = beginning(tokens, **drafter_fields)
    drafter = loop.starting_drafter(config, *arguments)
    drafter = dataclasses.replace(drafter, params=jax.tree.map(lambda a: a + 0.5, drafter.params))  # unlike fresh ones
    loading.save_drafter(drafter, where, dtype=jnp.float32)
    return drafter


def test_a_run_begins_with_another_backbone(tokens, tmp_path):
    earlier = save_start(tokens, tmp_path / "dflash", transition="none", transition_init="normal", confidence=False, block_length=2)
    config, arguments = beginning(tokens, conv_kernel_size=2, conv_group_size=8)
    fresh = loop.starting_drafter(config, *arguments)
    config.init_backbone = str(tmp_path / "dflash")
    drafter = loop.starting_drafter(config, *arguments)
    assert drafter.config == arguments[0]
    np.testing.assert_array_equal(drafter.draft_to_target, earlier.draft_to_target)
    old, new, unlike = (traverse_util.flatten_dict(d.params["backbone"], sep="/") for d in (earlier, drafter, fresh))
    convolutions = {name for name in new if "conv" in name}
    assert convolutions and set(new) == set(old) | convolutions
    for name in new:
        np.testing.assert_array_equal(new[name], unlike[name] if name in convolutions else old[name])
    for name in ("transition", "confidence"):
        jax.tree.map(np.testing.assert_array_equal, drafter.params[name], fresh.params[name])


@pytest.mark.parametrize("fields, text", [
    ({"draft_vocab_size": 19}, "drafts 20 ids, drafter.draft_vocab_size is 19"),
    ({"intermediate_size": 31}, "another backbone than the config asks for, see .*mlp"),
    ({"num_hidden_layers": 2}, "another backbone than the config asks for, see layers_1"),
    ({"target_layer_ids": (1,)}, "another backbone than the config asks for, see fc"),
    ({"target_layer_ids": (-1, 1)}, "reads layers .0, 1., drafter.target_layer_ids is .-1, 1."),
])
def test_another_backbone_is_refused(tokens, tmp_path, fields, text):
    save_start(tokens, tmp_path / "dflash", transition="none", transition_init="normal", confidence=False)
    config, arguments = beginning(tokens, **fields)
    config.init_backbone = str(tmp_path / "dflash")
    with pytest.raises(ValueError, match=f"init_backbone: .*dflash.* {text}|init_backbone: .*dflash {text}"):
        loop.starting_drafter(config, *arguments)


@pytest.mark.parametrize("confidence, saw_law, law, copies", [
    (False, False, False, 0), (True, False, False, 3), (True, False, True, 0), (True, True, True, 3)])
def test_a_run_goes_on_with_a_drafter_run_otherwise(tokens, tmp_path, confidence, saw_law, law, copies):
    """A confidence head that is missing, or sees less than it shall, is a fresh one, and so is a missing copy term."""
    earlier = save_start(tokens, tmp_path / "short", block_length=2, execution="sequential", confidence=confidence,
                         confidence_with_law=saw_law)
    config, arguments = beginning(tokens, block_length=3, confidence_with_law=law, copy_length=copies)
    fresh = loop.starting_drafter(config, *arguments)
    config.init_from = str(tmp_path / "short")
    drafter = loop.starting_drafter(config, *arguments)
    assert drafter.config == arguments[0]
    assert ("copying" in drafter.params) == (copies > 0)
    for name, params in drafter.params.items():
        kept = name != "copying" and (name != "confidence" or confidence and not law)  # none saw both law and copy
        jax.tree.map(np.testing.assert_array_equal, params, (earlier if kept else fresh).params[name])
    config.init_backbone = str(tmp_path / "short")
    with pytest.raises(ValueError, match="init_from, init_backbone: only one"):
        loop.starting_drafter(config, *arguments)
    config, arguments = beginning(tokens, rank=7)
    config.init_from = str(tmp_path / "short")
    with pytest.raises(ValueError, match="not only by its block_length, execution"):
        loop.starting_drafter(config, *arguments)


# -------------------------------------------------------------------------------------------------- batches and tables


def test_batches():
    lengths, weights = np.array([10, 20, 30, 40, 50, 60]), np.array([1.0, 1, 0, 1, 1, 2])
    first = [batches.choose(lengths, weights, 3, 5, step).tolist() for step in range(300)]
    assert first == [batches.choose(lengths, weights, 3, 5, step).tolist() for step in range(300)]
    assert first != [batches.choose(lengths, weights, 3, 6, step).tolist() for step in range(300)]
    assert all(len(set(chosen)) == 3 and 2 not in chosen for chosen in first)
    ones = np.bincount([batches.choose(lengths, weights, 1, 0, step)[0] for step in range(4000)], minlength=6)
    p = lengths * weights
    np.testing.assert_allclose(ones / 4000, p / p.sum(), atol=0.03)


def test_assemble():
    sequences = [np.arange(1, 6), np.arange(10, 22), np.arange(30, 33)]
    documents = Documents.pack([(s, np.arange(len(s)) >= n, "") for s, n in zip(sequences, [2, 4, 3])])
    stored = [(np.full((len(s), 2), i, ml_dtypes.bfloat16), np.full(len(s), i + 0.5)) for i, s in enumerate(sequences)]
    batch = batches.assemble(documents, lambda i: stored[i], [1, 0, 2], 8, 8)
    assert batch["tokens"].tolist() == [list(range(10, 18)), [1, 2, 3, 4, 5, 0, 0, 0], [30, 31, 32, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0] * 4 + [1] * 4, [0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]
    assert batch["features"].shape == (3, 8, 2) and batch["features"].dtype == ml_dtypes.bfloat16
    assert batch["features"].astype(int)[..., 0].tolist() == [[1] * 8, [0] * 8, [2, 2, 2, 0, 0, 0, 0, 0]]
    assert batch["log_normalizers"].tolist() == [[1.5] * 8, [0.5] * 5 + [0] * 3, [2.5] * 3 + [0] * 5]
    without = batches.assemble(documents, None, [0], 8, 8)
    assert without["features"] is None and without["log_normalizers"] is None and without["documents"] is None


def test_bigram_tables():
    """The best rank-R approximation of the dense matrix, written down one pair at a time."""
    rng, vocabulary, rank, smoothing = np.random.default_rng(0), 14, 4, 3.0
    draft_ids = np.array([0, 1, 3, 4, 6, 7, 9, 11, 12, 13])
    sequences = [rng.integers(0, vocabulary, n) ** 2 % vocabulary for n in (40, 1, 25, 60)]
    counts = np.zeros((vocabulary, len(draft_ids)))
    for sequence in sequences:
        for a, b in zip(sequence[:-1], sequence[1:]):
            if b in draft_ids:
                counts[a, draft_ids.tolist().index(b)] += 1
    unigram = (counts.sum(0) + 1) / (counts.sum(0) + 1).sum()
    dense = np.log(1 + counts / (smoothing * unigram))
    u, s, vt = np.linalg.svd(dense)
    a, b = bigram.factorise(sequences, vocabulary, draft_ids, rank, smoothing)
    assert a.shape == (vocabulary, rank) and b.shape == (len(draft_ids), rank) and a.dtype == b.dtype == np.float32
    np.testing.assert_allclose(a @ b.T, (u[:, :rank] * s[:rank]) @ vt[:rank], atol=1e-5)
    np.testing.assert_allclose(np.sort((a**2).sum(0)), np.sort(s[:rank]), rtol=1e-5)  # balanced between the two
    np.testing.assert_allclose((a**2).sum(0), (b**2).sum(0), rtol=1e-5)
    again = bigram.factorise(sequences, vocabulary, draft_ids, rank, smoothing)
    same_params(again, (a, b))


# -------------------------------------------------------------------------------------------------------- drafter files


@pytest.mark.parametrize("fields", [
    dict(transition="vanilla", confidence=True),
    dict(transition="none", layout="fill_in", output_multiplier=0.5, final_logit_softcapping=15.0),
    dict(transition="context", layout="fill_in", conv_kernel_size=2, execution="lattice", candidates=5,
         draft_ids=np.arange(3, 43)),
    dict(transition="joint", confidence=True, confidence_with_predecessor=False, target_layer_ids=(0,)),
    dict(transition="recurrent", confidence=True, draft_ids=np.arange(0, 48, 2), confidence_with_law=True),
])
def test_save_and_load(tmp_path, fields):
    """bfloat16 numbers come back bit for bit, and everything else as it was."""
    target = pairs.random_target()
    drafter = pairs.random_drafter(target, **fields)
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), drafter.params)
    drafter = dataclasses.replace(drafter, params=rounded)
    ds.save_drafter(drafter, tmp_path / "d")
    loaded = ds.load_drafter(tmp_path / "d", target)
    assert loaded.config == drafter.config
    same_params(loaded.params, drafter.params)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(drafter.params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(loaded.params))
    np.testing.assert_array_equal(loaded.embedding, target.embedding())
    np.testing.assert_array_equal(loaded.head_rows, drafter.head_rows)
    assert (loaded.draft_to_target is None) == ("draft_ids" not in fields)
    if loaded.draft_to_target is not None:
        np.testing.assert_array_equal(loaded.draft_to_target, fields["draft_ids"])
    stored = safetensors.flax.load_file(tmp_path / "d" / "model.safetensors")
    assert {a.dtype for name, a in stored.items() if name != "d2t"} == {jnp.dtype(jnp.bfloat16)}
    assert "layers.0.self_attn.q_proj.weight" in stored
    ds.save_drafter(loaded, tmp_path / "d")  # over itself
    same_params(ds.load_drafter(tmp_path / "d", target).params, drafter.params)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "drafter"
    target = pairs.random_target()
    ds.save_drafter(pairs.random_drafter(target, confidence=True, draft_ids=np.arange(40)), directory)
    return directory, target


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("norm.weight"), "tensor 'norm.weight' is missing, expected [32] BF16"),
    (lambda t: t.pop("d2t"), "tensor 'd2t' is missing, expected [40] I32"),
    (lambda t: t.update(extra=jnp.ones(3)),
     "tensor 'extra' [3] F32 is not expected: nothing in config.json asks for it"),
    (lambda t: t.update({"fc.weight": jnp.ones((64, 32))}),
     "tensor 'fc.weight' has shape [64, 32], expected [32, 64]"),
    (lambda t: t.update({"d2t": t["d2t"] + 9}), "tensor 'd2t' points outside the vocabulary of 48"),
    (lambda t: t.update({"d2t": t["d2t"] - 1}), "tensor 'd2t' points outside the vocabulary of 48"),
])
def test_wrong_tensors(saved, tmp_path, change, message):
    directory, target = saved
    shutil.copytree(directory, tmp_path / "d")
    file = tmp_path / "d" / "model.safetensors"
    tensors = safetensors.flax.load_file(file)
    change(tensors)
    safetensors.flax.save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        ds.load_drafter(tmp_path / "d", target)
    assert str(error.value) == f"{file}: {message}"


def nested(**fields):
    return lambda c: c["backbone"].update(fields)


@pytest.mark.parametrize("change, message", [
    (lambda c: c.pop("block_length"), "block_length"),
    (lambda c: c.pop("backbone"), "backbone"),
    (lambda c: c["backbone"].pop("head_dim"), "head_dim"),
    (lambda c: c.update(blok=3), "blok"),
    (nested(hiden=3), "hiden"),
    (lambda c: c.update(block_length="seven"), "block_length"),
    (lambda c: c.update(block_length=2.5), "block_length"),
    (lambda c: c.update(block_length=True), "block_length"),
    (lambda c: c.update(target_layer_ids=3), "target_layer_ids"),
    (lambda c: c.update(target_layer_ids=[0, "1"]), "target_layer_ids"),
    (lambda c: c.update(backbone=[1]), "backbone"),
    (nested(hidden_size="32"), "hidden_size"),
    (nested(hidden_size=0), "hidden_size"),
    (nested(num_key_value_heads=3), "num_key_value_heads"),
    (nested(head_dim=7), "head_dim"),
    (nested(conv_kernel_size=2, conv_group_size=5), "conv_group_size"),
    (lambda c: c.update(rank=0), "rank"),
    (lambda c: c.update(layout="middle"), "layout: unknown name 'middle'; allowed: anchor_first, fill_in"),
    (lambda c: c.update(transition=None), "transition"),
    (lambda c: c.update(vocab_size=64), "has shape [48, 8], expected [64, 8]"),
    (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures: ['LlamaForCausalLM']; must be one of"),
    (lambda c: c.pop("architectures"), "architectures: None; must be one of"),
])
def test_wrong_config_fields(saved, tmp_path, change, message):
    directory, target = saved
    shutil.copytree(directory, tmp_path / "d")
    file = tmp_path / "d" / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        ds.load_drafter(tmp_path / "d", target)
    text = str(error.value)
    assert message in text and "\n" not in text, text
    assert str(tmp_path / "d") in text, text


@pytest.mark.parametrize("name, data, message", [
    ("config.json", b"{", "not JSON"),
    ("config.json", b"[]", "must be a JSON object"),
    ("config.json", b"\xff\xfe{}", "not JSON"),
    ("model.safetensors", b"", "0 bytes"),
    ("model.safetensors", b"\xff" * 100, "header length"),
    ("model.safetensors", None, "data_offsets"),
], ids=["cut", "no-object", "no-text", "empty", "no-header", "cut-tensors"])
def test_damaged_drafter_files(saved, tmp_path, name, data, message):
    directory, target = saved
    shutil.copytree(directory, tmp_path / "d")
    file = tmp_path / "d" / name
    file.write_bytes(file.read_bytes()[:-7] if data is None else data)
    with pytest.raises(ValueError) as error:
        ds.load_drafter(tmp_path / "d", target)
    assert str(file) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


def test_missing_drafter_files(saved, tmp_path):
    directory, target = saved
    with pytest.raises(FileNotFoundError, match="neither a drafter .config.json. nor a training run"):
        ds.load_drafter(tmp_path, target)
    shutil.copytree(directory, tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as error:
        ds.load_drafter(tmp_path / "d", target)
    assert str(tmp_path / "d") in str(error.value) and "model.safetensors" in str(error.value)


def test_unknown_layout(saved, tmp_path):
    directory, target = saved
    with pytest.raises(ValueError, match="layout: 'onnx'; allowed: native"):
        ds.save_drafter(ds.load_drafter(directory, target), tmp_path / "x", "onnx")
    assert not (tmp_path / "x").exists()


def test_drafter_of_another_target(saved):
    directory, _ = saved
    with pytest.raises(ValueError, match="hidden_size: the drafter has 32, the target 16") as error:
        ds.load_drafter(directory, pairs.random_target(hidden_size=16))
    assert str(directory) in str(error.value)


def test_every_published_name_is_used_once():
    for fields in (dict(transition="joint", confidence=True), dict(transition="context", conv_kernel_size=2),
                   dict(transition="recurrent")):
        drafter = pairs.random_drafter(pairs.random_target(), layers=2, **fields)
        assert len(pairs.to_published(drafter.params)) == len(jax.tree.leaves(drafter.params))
    assert huggingface.published_name(("backbone", "layers_0", "mlp", "up_proj", "weight")) == (
        "layers.0.mlp.up_proj.weight", False)
