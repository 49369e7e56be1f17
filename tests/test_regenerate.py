"""`python -m train.regenerate` as a user runs it, with a target that answers at once in place of a real one."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dspark_jax.data import conversations
from dspark_jax.data.documents import Documents
from train import regenerate

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Answers are random under the seed of their batch, so that the tests see what decides them; after `die_after`
# batches the process is killed.
STUB = """
import os, random, runpy, signal, sys, types
import dspark_jax as ds
die_after = int(sys.argv.pop(1))
class Tokenizer:
  def chat(self, messages):
    encode = lambda m: list(map(int, m["content"].split())) if m["role"] == "assistant" else [1] * len(m["content"])
    return [t for m in messages for t in encode(m)]
  def decode(self, ids): return " ".join(map(str, ids))
def generate(target, drafter, prompts, *, max_new_tokens, temperature, top_k, top_p, seed):
  global die_after
  if die_after == 0: os.kill(os.getpid(), signal.SIGKILL)
  die_after -= 1
  rng = random.Random(seed)
  return types.SimpleNamespace(tokens=[[rng.randrange(99) for _ in range(max_new_tokens)] for _ in prompts])
ds.generate, ds.load_target = generate, lambda where: types.SimpleNamespace(tokenizer=Tokenizer())
sys.argv[0] = "regenerate"
runpy.run_module("train.regenerate", run_name="__main__")
"""


def _run(*arguments, die_after=-1):
    return subprocess.run(
        [sys.executable, "-c", STUB, str(die_after), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    conversations.write_conversations(
        path,
        [conversations.Conversation(f"p{i}", "toy", ({"role": "user", "content": "é" * length},))
         for i, length in enumerate((5, 2, 6, 1, 3, 4, 7))],
    )
    return path


def test_killed_torn_and_resumed_gives_the_same_answers_as_one_run(prompts, tmp_path):
    flags = (f"--prompts={prompts}", "--batch_size=2", "--max_new_tokens=3", "--max_prompt_tokens=6")
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "sub" / "resumed.jsonl"
    result = _run(*flags, f"--out={whole}")
    assert result.returncode == 0, result.stderr
    assert "left out: 1 prompts of more than --max_prompt_tokens=6" in result.stdout
    assert _run(*flags, f"--out={resumed}", die_after=2).returncode == -9
    lines = resumed.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    resumed.write_bytes(
        b"".join(lines[:2]) + lines[2][:-5]
    )  # killed in the middle of a line, and one line of the batch lost
    result = _run(*flags, f"--out={resumed}", f"--tokens={tmp_path / 'tokens' / 't.npz'}")
    assert result.returncode == 0, result.stderr
    assert "the last line was cut off" in result.stdout and "7 prompts, 2 of them answered" in result.stdout
    assert whole.read_text() == resumed.read_text()
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [r["id"] for r in rows] == [f"p{i}" for i in range(6)]  # the order of the prompts
    for row in rows:
        prompt, answer = row["input_ids"][:-3], row["input_ids"][-3:]
        assert row["source"] == "toy" and row["temperature"] == 1.0 and row["loss_mask"] == [0] * len(prompt) + [1] * 3
        assert prompt == [1] * len(row["conversations"][0]["content"])
        assert row["conversations"][-1] == {"role": "assistant", "content": " ".join(map(str, answer))}
    packed = Documents.load(tmp_path / "tokens" / "t.npz")
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(packed.document(i), (row["input_ids"], row["loss_mask"]))
    again = _run(*flags, f"--out={whole}", die_after=0)  # nothing is left to do, so nothing is decoded
    assert again.returncode == 0 and whole.read_text() == resumed.read_text()


def test_every_turn_is_answered_with_the_targets_own_answers_before_it(tmp_path):
    say = lambda *turns: tuple({"role": role, "content": content} for role, content in turns)
    given = {
        "three": say(("system", "s"), ("user", "a"), ("assistant", "90 91"), ("user", "bb"), ("user", "b"),
                     ("assistant", "92"), ("assistant", "93"), ("user", "ccc")),
        "answered": say(("user", "aaaa"), ("assistant", "94")),
        "long": say(("user", "a"), ("assistant", "95"), ("user", "b" * 40), ("user", "c")),
        "one": say(("user", "aaa")),
    }
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    conversations.write_conversations(path, [conversations.Conversation(n, "", m) for n, m in given.items()])
    flags = (f"--prompts={path}", "--max_new_tokens=2", "--max_prompt_tokens=20", f"--out={out}")
    result = _run(*flags)
    assert result.returncode == 0, result.stderr
    assert "cut: 1 conversations, before a turn whose prompt has more than --max_prompt_tokens=20" in result.stdout
    rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == list(given)
    roles = {name: [m["role"][0] for m in row["conversations"]] for name, row in rows.items()}
    assert roles == {"three": [*"suauuaua"], "answered": [*"ua"], "long": [*"ua"], "one": [*"ua"]}
    for name, row in rows.items():
        said = [m for m in row["conversations"] if m["role"] != "assistant"]
        assert said == [m for m in given[name] if m["role"] != "assistant"][:len(said)]
        expected = [(t, spoken) for m in row["conversations"] for t, spoken in (
            [(int(t), 1) for t in m["content"].split()] if m["role"] == "assistant" else [(1, 0)] * len(m["content"]))]
        assert list(zip(row["input_ids"], row["loss_mask"])) == expected
    assert sum(rows["three"]["loss_mask"]) == 6
    # A conversation that is lost is answered again as it was, and finds its place again.
    whole = out.read_text()
    out.write_text("".join(line for line in whole.splitlines(keepends=True) if '"three"' not in line))
    assert _run(*flags).returncode == 0 and out.read_text() == whole


def test_answers_that_are_encoded_differently_are_not_supervised():
    first, second = ([1, 2], [5, 6]), ([1, 2, 5, 6, 3], [7])
    assert regenerate.join_turns([first, second]) == ([1, 2, 5, 6, 3, 7], [0, 0, 1, 1, 0, 1])
    merged = ([1, 2, 56, 3], [7])
    assert regenerate.join_turns([first, merged]) == ([1, 2, 56, 3, 7], [0, 0, 0, 0, 1])


def test_lines_of_earlier_versions_are_packed(tmp_path):
    path, row = tmp_path / "a.jsonl", {"id": 1, "messages": [{"role": "user", "content": "x"}]}
    path.write_text(json.dumps(row | {"prompt_tokens": [4, 5], "answer_tokens": [6]}) + "\n")
    np.testing.assert_array_equal(regenerate.pack(path).document(0), ([4, 5, 6], [0, 0, 1]))
    for more in ({}, {"prompt_tokens": [4], "answer_tokens": 3}, {"input_ids": [-1], "loss_mask": [1]}):
        path.write_text(json.dumps(row | more) + "\n")
        with pytest.raises(ValueError, match=f"^{path}:1: field"):
            regenerate.pack(path)


def test_bad_input_is_one_line_and_exit_code_2(prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "p0"}\n')
    twice = tmp_path / "twice.jsonl"
    twice.write_text(prompts.read_text() + prompts.read_text())
    new = f"--out={tmp_path / 'new.jsonl'}"
    for arguments, message in (
        ((f"--prompts={prompts}", f"--out={out}"), f"{out}:1: field conversations: missing"),
        ((f"--prompts={twice}", new), "id 'p0' occurs twice"),
        ((f"--prompts={tmp_path / 'none'}", new), f"{tmp_path / 'none'}: No such file"),
        ((new,), "no prompts: allowed: --prompts=FILE or --source="),
    ):
        result = _run(*arguments)
        assert result.returncode == 2, (arguments, result.stderr)
        assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert out.read_text() == '{"id": "p0"}\n'


def test_help_exits_0_and_explains():
    result = subprocess.run(
        [sys.executable, "-m", "train.regenerate", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0 and "--max_new_tokens" in result.stdout and "Prompts come from" in result.stdout
