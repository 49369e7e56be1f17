"""`python -m train.regenerate` as a user runs it, with a target that answers at once in place of a real one."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dspark_jax.data import conversations

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Answers are random under the seed of their batch, so that the tests see what decides them; after `die_after`
# batches the process is killed.
STUB = """
import os, random, runpy, signal, sys, types
import dspark_jax as ds
die_after = int(sys.argv.pop(1))
class Tokenizer:
  def chat(self, messages): return [1] * len(messages[-1]["content"])
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
        [conversations.Conversation(f"p{i}", "toy", ({"role": "user", "content": "é" * (i + 1)},)) for i in range(7)],
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
    assert sorted(r["id"] for r in rows) == [f"p{i}" for i in range(6)]
    for row in rows:
        assert row["source"] == "toy" and row["temperature"] == 1.0 and len(row["answer_tokens"]) == 3
        assert row["conversations"][-1] == {"role": "assistant", "content": " ".join(map(str, row["answer_tokens"]))}
    tokens = conversations.OnPolicyTokens.load(tmp_path / "tokens" / "t.npz")
    for i, row in enumerate(rows):
        prompt, answer = tokens.conversation(i)
        np.testing.assert_array_equal(prompt, row["prompt_tokens"])
        np.testing.assert_array_equal(answer, row["answer_tokens"])
    again = _run(*flags, f"--out={whole}", die_after=0)  # nothing is left to do, so nothing is decoded
    assert again.returncode == 0 and whole.read_text() == resumed.read_text()


def test_bad_input_is_one_line_and_exit_code_2(prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "p0"}\n')
    twice = tmp_path / "twice.jsonl"
    twice.write_text(prompts.read_text() + prompts.read_text())
    answered = tmp_path / "answered.jsonl"
    conversations.write_conversations(
        answered,
        [conversations.Conversation(1, "", ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}))],
    )
    new = f"--out={tmp_path / 'new.jsonl'}"
    for arguments, message in (
        ((f"--prompts={prompts}", f"--out={out}"), f"{out}:1: field conversations: missing"),
        ((f"--prompts={twice}", new), "id 'p0' occurs twice"),
        ((f"--prompts={answered}", new), "id 1: the last message is the assistant's; allowed: the user's"),
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
