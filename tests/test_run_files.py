"""What a run keeps in its directory beside checkpoints: its config, its log, profiles, and the table at its end."""

import copy
import json

import pytest
from ml_collections import config_dict

import tiny
import tiny_run
from dspark_jax.data import sources
from train import held_out, loop, metrics_log, run_config, step_trace

# ------------------------------------------------------------------------------------------------------------ config


OLD = {"seed": 3, "optimizer": {"lr": 0.01, "clip": None}, "taps": [0, 1], "weights": {"a": 1.0}, "mesh": {"data": 8},
       "evaluation": {"prompts": 0}, "log_every": 1, "batch": {"anchors": 6, "micro_steps": 1}}


def claimed(workdir, config, trained=True):
    run_config.claim(workdir, config_dict.ConfigDict(config))
    if trained:
        (workdir / "checkpoints").mkdir(exist_ok=True)
    return json.loads((workdir / "config.json").read_text())


def changed(**fields):
    config = copy.deepcopy(OLD)
    for name, value in fields.items():
        section, _, field = name.rpartition("__")
        (config[section] if section else config)[field] = value
    return config


def test_the_same_config_and_what_may_differ(tmp_path):
    assert claimed(tmp_path, OLD) == OLD == claimed(tmp_path, OLD)
    free = changed(log_every=10, evaluation__prompts=8, mesh={"data": 2, "tensor": 2}, batch__micro_steps=2, profile="3")
    assert claimed(tmp_path, free) == free  # the file says what the run was last started with


@pytest.mark.parametrize("fields, message", [
    ({"seed": 4}, "(seed: 3 there, 4 now)"),
    ({"optimizer__lr": 0.02, "seed": 5, "log_every": 7}, "(optimizer.lr: 0.01 there, 0.02 now; seed: 3 there, 5 now)"),
    ({"optimizer__clip": 1.0}, "(optimizer.clip: null there, 1.0 now)"),
    ({"taps": [0, 2]}, "(taps: [0, 1] there, [0, 2] now)"),
    ({"weights": {"b": 1.0}}, "(weights.a: 1.0 there, not set now; weights.b: not set there, 1.0 now)"),
    ({"batch__anchors": 7}, "(batch.anchors: 6 there, 7 now)"),
])
def test_another_config(tmp_path, fields, message):
    claimed(tmp_path, OLD)
    with pytest.raises(ValueError) as error:
        claimed(tmp_path, changed(**fields))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: this run was started with another config")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert json.loads((tmp_path / "config.json").read_text()) == OLD


def test_a_mistake_can_be_put_right_before_there_is_a_checkpoint(tmp_path):
    claimed(tmp_path, OLD, trained=False)
    assert claimed(tmp_path, changed(seed=4)) == changed(seed=4)


@pytest.mark.parametrize("text", ['{"seed": 3, "st', "[1]", ""])
def test_damaged_config(tmp_path, text):
    claimed(tmp_path, OLD)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as error:
        claimed(tmp_path, OLD)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: not JSON") and "\n" not in str(error.value)
    assert (tmp_path / "config.json").read_text() == text


# --------------------------------------------------------------------------------------------------------------- log


def line(step, loss, rates, skipped):
    return {"step": step, "loss": loss, "accept_rate": rates, "expected_accepted_length": 1.5 + step,
            "positions_per_second": 100.0 * step, "skipped": skipped}


def test_log_goes_on_after_the_checkpoint(tmp_path):
    with metrics_log.MetricsLog(tmp_path, 0) as log:
        log.write(0, {metrics_log.HELD_OUT: 1.25})
        for step in (2, 4, 6):
            log.write(step, {"loss": step / 2, "accept_rate": [0.5, 0.25]})
        log.write(6, {metrics_log.HELD_OUT: 1.5})
    path = tmp_path / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"loss": 3}\n17\n{"step": 8, "lo')  # no step, no object, and a line that was cut off
    with metrics_log.MetricsLog(tmp_path, 6) as log:
        assert log.held_out == {0: 1.25, 6: 1.5}
    with metrics_log.MetricsLog(tmp_path, 5) as log:
        assert log.held_out == {0: 1.25}
        log.write(6, {"loss": 9.0})
    written = [json.loads(text) for text in path.read_text().splitlines()]
    assert written == metrics_log.read(tmp_path) and written[-1] == {"step": 6, "loss": 9.0}
    assert [entry["step"] for entry in written] == [0, 2, 4, 6]
    assert written[1] == {"step": 2, "loss": 1.0, "accept_rate": [0.5, 0.25]}
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_table():
    lines = [{"step": 0, metrics_log.HELD_OUT: 1.0}, *(line(n, 100.0, [9.0, 9.0], 0) for n in range(1, 4)),
             *(line(n, n / 10, [0.5, n / 100], 2) for n in range(4, 14)), {"step": 13, metrics_log.HELD_OUT: 2.0}]
    rows = [text.rsplit(None, 1) for text in metrics_log.table(lines).splitlines()]
    assert metrics_log.table(lines).splitlines()[0].split("  ")[0] == "after 13 steps"
    assert rows[1:] == [["loss", "0.850"], ["accept rate, position 1", "0.500"], ["accept rate, position 2", "0.085"],
                        ["expected accepted length", "10.000"], ["positions/s", "850.000"], ["skipped batches", "2"]]
    assert metrics_log.table(lines[:1]) == "no step was logged"


# ----------------------------------------------------------------------------------------------------------- profiles


@pytest.mark.parametrize("steps, start, expected", [
    (None, 7, []), ("10:13", 0, [10, 11, 12]), ("10:13", 11, [10, 11, 12]), ("3", 0, [2, 3, 4]), ("1", 7, [9])])
def test_which_steps_are_traced(steps, start, expected):
    assert list(step_trace.StepTrace(steps, start, "x").steps) == expected


@pytest.mark.parametrize("steps", ["", "0", "5:5", "7:5", "a", "1:2:3", "-1", ":5", "5:", "2.5"])
def test_bad_steps_to_trace(steps):
    with pytest.raises(ValueError) as error:
        step_trace.StepTrace(steps, 0, "x")
    assert str(error.value).startswith(f"profile: {steps!r}; must be") and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------------- whole runs


def test_when_prompts_are_decoded():
    options = config_dict.ConfigDict({"prompts": 1, "every": 0})
    due = lambda: [step for step in range(11) if held_out.is_due(options, step, 10)]
    assert due() == [0, 10]
    options.every = 4
    assert due() == [0, 4, 8, 10]
    options.prompts = 0
    assert due() == []


def test_held_out_prompts():
    options, target = config_dict.ConfigDict({"prompts": 2}), tiny.target()
    prompts = held_out.prompts(options, target)
    assert len(prompts) == 2 * len(sources.EVALUATION_SOURCES) and all(map(len, prompts))
    with pytest.raises(ValueError, match="evaluation.prompts: this target has no tokenizer"):
        held_out.prompts(options, tiny_run.target())
    options.prompts = 0
    assert held_out.prompts(options, tiny_run.target()) == []


@pytest.mark.slow
def test_held_out_prompts_profile_and_sparse_log(tmp_path, monkeypatch, capsys):
    """Five steps of which every third is logged, beside the last, and prompts decoded every second; some are profiled."""
    monkeypatch.setattr(held_out, "prompts", lambda *_: [[3, 4, 5], [6, 7, 8]])
    tiny_run.write_tokens(tmp_path / "tiny.npz")
    config = tiny_run.config(tmp_path / "tiny.npz")
    config.steps, config.log_every, config.profile, config.checkpoint_every = 5, 3, "2:4", 100
    config.evaluation.prompts, config.evaluation.every, config.evaluation.blocks_every = 1, 2, 0
    workdir, target = tmp_path / "run", tiny_run.target()
    loop.train(config, workdir, target)
    lines = [json.loads(text) for text in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in lines if "loss" in entry] == [3, 5]
    decoded = {entry["step"]: entry[metrics_log.HELD_OUT] for entry in lines if metrics_log.HELD_OUT in entry}
    assert list(decoded) == [0, 2, 4, 5] and all(length >= 1 for length in decoded.values())
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    printed = capsys.readouterr().out
    assert "after 5 steps" in printed and "skipped batches" in printed
    gain = f"held-out prompts: {decoded[0]:.3f} before training, {decoded[5]:.3f} after"
    assert gain in printed
    config.profile, config.log_every = None, 1
    loop.train(config, workdir, target)  # finished already: nothing is trained or decoded again
    assert gain in capsys.readouterr().out
    assert [json.loads(text) for text in (workdir / "metrics.jsonl").read_text().splitlines()] == lines


@pytest.mark.slow
def test_batches_without_an_anchor_are_counted(tmp_path, monkeypatch, capsys):
    """Their step changes nothing, and none of their numbers is NaN."""
    tiny_run.write_tokens(tmp_path / "tiny.npz")
    config = tiny_run.config(tmp_path / "tiny.npz")
    config.steps, config.evaluation.blocks_every = 5, 0
    assemble = loop.batches.assemble
    made = []

    def every_second_is_empty(*arguments):
        batch = assemble(*arguments)
        made.append(batch)
        return batch | {"loss_mask": 0 * batch["loss_mask"]} if len(made) % 2 else batch

    monkeypatch.setattr(loop.batches, "assemble", every_second_is_empty)
    loop.train(config, tmp_path / "run", tiny_run.target())
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["skipped"] for entry in lines] == [1, 1, 2, 2, 3]
    assert [entry["loss"] for entry in lines[::2]] == [0, 0, 0] and lines[1]["loss"] > 0
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert capsys.readouterr().out.splitlines()[-1].split() == ["skipped", "batches", "3"]
