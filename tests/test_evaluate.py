"""What is measured, by hand and against `ds.generate`; and `python -m train.evaluate` as a user runs it."""

import json

import pytest
import tiny

import dspark_jax as ds
from program import run_tiny
from train import measure

def _measurement(accepted, proposed, tokens=([1],), plain=None, **changes):
    return measure.Measurement(**{
        "result": ds.Result(list(tokens), accepted, proposed), "seconds": 2.0, "plain": plain, "plain_seconds": 4.0,
        "block_length": 3, "greedy": True} | changes)


def test_acceptance_is_given_that_all_drafts_before_were_accepted():
    m = _measurement([[0, 1, 3], [2, 1]], [[3, 3, 3], [2, 1]])
    # Draft 1: 4 of 5 rounds. Draft 2: of those 4, one was not verified further; 2 of 3. Draft 3: likewise 1 of 1.
    assert m.acceptance == [4 / 5, 2 / 3, 1.0]
    assert m.accepted_length == (1 + 2 + 4 + 3 + 2) / 5
    assert _measurement([[0]], [[3]]).acceptance == [0.0, None, None]


def test_rates_ratio_identical_and_merging():
    plain = ds.Result([[1, 2, 3, 4], [5]], [[], []], [[], []])
    m = _measurement([[3], []], [[3], []], tokens=([1, 2, 3, 4], [6]), plain=plain)
    assert (m.tokens_per_second, m.plain_tokens_per_second, m.ratio, m.identical) == (2.5, 1.25, 2.0, 1)
    both = measure.merge([m, m])
    assert (both.tokens_per_second, both.ratio, both.identical, both.accepted_length) == (2.5, 2.0, 2, 4.0)
    assert _measurement([[3]], [[3]], plain=plain, greedy=False).identical is None
    alone = measure.merge([_measurement([[3]], [[3]])])
    assert alone.plain_tokens_per_second is alone.ratio is alone.identical is None


def test_evaluate_measures_what_generate_does():
    target = tiny.target()
    prompts = [[3, 4, 5], [70, 71]]
    exact = measure.evaluate(target, tiny.drafter(target), prompts, max_new_tokens=13)
    assert exact.acceptance == [1.0, 1.0, 1.0] and exact.accepted_length == 4.0 and exact.identical == 2
    noisy = tiny.drafter(target, noise=0.5)
    m = measure.evaluate(target, noisy, prompts, max_new_tokens=30)
    each = [ds.generate(target, noisy, [prompt], max_new_tokens=30) for prompt in prompts]
    assert m.result.accepted == [r.accepted[0] for r in each] and m.result.tokens == [r.tokens[0] for r in each]
    assert 1 < m.accepted_length < 4 and m.identical == 2
    assert m.seconds > 0 and m.plain_seconds > 0
    sampled = measure.evaluate(target, noisy, prompts, max_new_tokens=30, temperature=1.0, plain=False)
    assert sampled.plain is None and sampled.identical is None


def test_block_length_can_be_shortened_but_not_lengthened(monkeypatch):
    target = tiny.target()
    monkeypatch.setattr(ds, "load_drafter", lambda where, target: tiny.drafter(target))
    assert measure.load_drafter("x", target).config.block_length == 3
    short = measure.load_drafter("x", target, 2)
    assert measure.evaluate(target, short, [[3, 4]], max_new_tokens=7).result.accepted == [[2, 2]]
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"--block_length={wrong}: allowed: 1 to 3"):
            measure.load_drafter("x", target, wrong)


def test_the_program_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "new" / "result.json"
    result = run_tiny("train.evaluate", "--drafter=.", "--sets=chat,gsm8k", "--count=2", "--max_new_tokens=20", "--block_length=2",
                  f"--out={out}")
    assert result.returncode == 0, result.stderr
    header, chat, gsm8k, mean, _, machine = result.stdout.splitlines()
    assert header.split("  ")[0] == "set" and "position 2" in header and "position 3" not in header
    assert chat.startswith("chat ") and chat.endswith(" 2/2") and gsm8k.startswith("gsm8k ") and mean.endswith(" -")
    assert machine.startswith("measured on: processor ")
    results = json.loads(out.read_text())
    assert list(results) == ["settings", "machine", "sets", "mean"] and results["settings"]["block_length"] == 2
    lengths = [results["sets"][name]["accepted_length"] for name in ("chat", "gsm8k")]
    assert results["mean"]["accepted_length"] == pytest.approx(sum(lengths) / 2)
    assert results["sets"]["chat"]["tokens"] == 40 and results["machine"]["jax"]


@pytest.mark.parametrize("arguments, message", [
    (["--drafter=.", "--sets=chat,poems"], "source 'poems' is unknown; allowed: gsm8k, humaneval, chat"),
    (["--drafter=none"], "--drafter: none: no such directory"),
    (["--drafter=.", "--block_length=4"], "--block_length=4: allowed: 1 to 3"),
    (["--temperature=-1"], "temperature"),
])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = run_tiny("train.evaluate", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
