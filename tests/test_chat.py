"""Chat data -> documents: what becomes of every kind of row, and of every kind of bad one."""

import json

import numpy as np
import pytest
from test_tokenizer import toy_metadata

from dspark_jax.data import chat
from dspark_jax.tokenizer import Tokenizer

VOCABULARY = 260


@pytest.fixture(scope="module")
def toy():
    return Tokenizer.from_gguf(toy_metadata())


def with_template(template):
    return Tokenizer.from_gguf(toy_metadata(**{"tokenizer.chat_template": template}))


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


# ------------------------------------------------------------------------------------------------------- the tokenizer


def test_answers_are_where_the_model_writes_them(toy):
    """Several turns, with answers that hold the template's own strings: found by position, not by text."""
    header = "<|im_start|>assistant\n"
    messages = said(("system", "S"), ("user", f"say {header}x<|im_end|>"), ("assistant", f"{header}x<|im_end|>"),
                    ("user", "he"), ("user", "again"), ("assistant", ""), ("assistant", "the end"),
                    ("user", "not answered"))
    ids, spoken = toy.conversation(messages)
    expected_ids, expected = [], []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = toy.chat(messages[:i])
            assert prompt[:len(expected_ids)] == expected_ids  # each answer stands behind what the model saw
            answer = [*toy.encode(message["content"]), 2]
            expected += [False] * (len(prompt) - len(expected_ids)) + [True] * len(answer)
            expected_ids = prompt + answer
    assert ids == expected_ids and spoken == expected
    assert toy.decode([i for i, s in zip(ids, spoken) if s], control_tokens=True) == (
        f"{header}x<|im_end|>" + "<|im_end|>" + "<|im_end|>" + "the end<|im_end|>")
    for limit in (1, 40, len(ids) - 1, len(ids) + 5):
        assert toy.conversation(messages, limit) == (ids[:limit], spoken[:limit])


def test_a_limit_bounds_the_work(toy, monkeypatch):
    """Thousands of turns and a limit: the template runs once over all of them and then over short beginnings only."""
    seen, render = [], toy._render

    def count(messages, *rest):
        seen.append(len(messages))
        return render(messages, *rest)

    monkeypatch.setattr(toy, "_render", count)
    messages = said(*[("user", "a"), ("assistant", "b")] * 5000)
    ids, spoken = toy.conversation(messages, 300)
    assert len(ids) == len(spoken) == 300 and any(spoken)
    assert seen[0] == 10_000 and len(seen) < 30 and max(seen[1:]) < 60


def test_a_template_that_thinks():
    """A thinking block that the template puts before the last answer only belongs to that answer."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<t></t>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    ids, spoken = tokenizer.conversation(said(("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")))
    answers = [i for i, s in zip(ids, spoken) if s]
    assert tokenizer.decode(answers, control_tokens=True) == "a<|im_end|><t></t>b<|im_end|>"


@pytest.mark.parametrize("template, message", [
    ("{{ raise_exception('no') }}", "chat template: no"),
    ("{{ messages[0].content + 1 }}", "chat template: can only concatenate str"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", r"writes no stop token behind messages\[1\]"),
    ("{{ messages | length }}<|im_end|>", r"what it writes before messages\[1\] changes"),
])
def test_templates_that_cannot_be_used(template, message):
    with pytest.raises(ValueError, match=message):
        with_template(template).conversation(said(("user", "u"), ("assistant", "a")))


# ------------------------------------------------------------------------------------------------------------ documents


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_every_kind_of_row(toy, tmp_path):
    turns = said(("user", "u"), ("assistant", "abc"), ("user", "v"), ("assistant", "de"))
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in turns]
    path = write(
        tmp_path / "a.jsonl", {"id": 1, "conversations": turns, "source": "s"}, "", {"conversations": sharegpt},
        {"messages": turns}, {"text": "<|im_start|>hello<|im_end|>"},
        {"input_ids": [7, 8, 9, 4], "loss_mask": [1, 0, 1, 1], "conversations": turns},
        {"input_ids": [7, 8, 9, 4], "loss_mask": [True, True, False, False]},
        {"input_ids": [5], "loss_mask": [1]}, {"input_ids": [], "loss_mask": []},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]},
        {"input_ids": [5] * 40 + [6] * 30, "loss_mask": [0] * 39 + [1] * 31})
    documents, report = chat.read_documents(path, toy, VOCABULARY, 40)
    ids, spoken = toy.conversation(turns)
    assert len(ids) > 40
    for i in range(3):
        np.testing.assert_array_equal(documents.document(i), (ids[:40], spoken[:40]))
    text_ids = toy.encode("<|im_start|>hello<|im_end|>", control_tokens=True)
    np.testing.assert_array_equal(documents.document(3), (text_ids, [0, 1, 1, 1, 1, 1]))
    np.testing.assert_array_equal(documents.document(4), ([7, 8, 9, 4], [0, 0, 1, 1]))
    assert documents.source.tolist() == ["s", "", "", "", ""]
    assert str(report).splitlines() == [
        f"{path}: 5 documents, 3 of them cut after 40 tokens",
        f"dropped: 2 rows with {chat.NO_ANCHOR}, the first in line 7",
        f"dropped: 2 rows with {chat.TOO_SHORT}, the first in line 8",
        f"dropped: 1 rows with {chat.NO_ANCHOR}, in the first 40 tokens, the first in line 11"]
    first, report = chat.read_documents(path, toy, VOCABULARY, 40, count=2)
    assert len(first) == report.kept == 2 and not report.dropped


def test_a_million_tokens_are_cut(toy, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": said(("user", "u"), ("assistant", "ab " * 350_000))},
                 {"messages": said(("user", "x" * 1_000_000), ("assistant", "a"))},
                 {"input_ids": [3] * 1_000_000, "loss_mask": [1] * 1_000_000})
    documents, report = chat.read_documents(path, toy, VOCABULARY, 100)
    assert documents.length.tolist() == [100, 100] and report.truncated == 2
    assert report.dropped == {f"{chat.NO_ANCHOR}, in the first 100 tokens": (1, 2)}


GOOD = {"messages": said(("user", "u"), ("assistant", "abc"))}


@pytest.mark.parametrize("row, message", [
    ("{", "not JSON"),
    ({"id": 3}, "no field to read; allowed: conversations, messages, text, or input_ids with loss_mask"),
    ({"messages": said(("user", "u"), ("robot", "a"))}, r"field messages\[1\].role: 'robot' found; allowed: system"),
    ({"messages": said(("user", "u"))}, "messages: none of the assistant; allowed: at least one"),
    ({"messages": said(("user", "u"), ("assistant", 3))}, r"field messages\[1\].content: int found; allowed: text"),
    ({"text": 3}, "field text: int found; allowed: text"),
    ({"text": "abc", "source": 1}, "field source: 1 found"),
    ({"input_ids": [1, 2]}, "field loss_mask: allowed: a list of zeros and ones"),
    ({"input_ids": [1, [2]], "loss_mask": [1, 1]}, "field input_ids: allowed: a list of token ids"),
    ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "field input_ids: allowed: a list of token ids"),
    ({"input_ids": [1, 10**30], "loss_mask": [1, 1]}, "field input_ids: allowed: a list of token ids"),
    ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "field input_ids: -2 found"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "field loss_mask: 1 entries; allowed: 2"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "field loss_mask: allowed: zeros and ones"),
    ({"input_ids": [1, 260], "loss_mask": [0, 1]}, r"token id 260; allowed: the target's vocabulary, \[0, 260\)"),
])
def test_a_bad_row_is_named(toy, tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", GOOD, row)
    with pytest.raises(ValueError, match=message) as error:
        chat.read_documents(path, toy, VOCABULARY, 100)
    assert str(error.value).startswith(f"{path}:2: ") and "\n" not in str(error.value)


def test_files_without_a_document(toy, tmp_path):
    for rows, message in (((), "the file holds no rows"), (("", "  "), "the file holds no rows"),
                          (({"input_ids": [1], "loss_mask": [1]},) * 2, f"dropped: 2 rows with {chat.TOO_SHORT}")):
        path = write(tmp_path / "a.jsonl", *rows)
        with pytest.raises(ValueError, match=f"^{path}: no document to train on: {message}"):
            chat.read_documents(path, toy, VOCABULARY, 100)
    with pytest.raises(FileNotFoundError):
        chat.read_documents(tmp_path / "none.jsonl", toy, VOCABULARY, 100)


def test_a_smaller_vocabulary_and_no_tokenizer(toy, tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(ValueError, match=r":1: token id \d+; allowed: the target's vocabulary, \[0, 50\)"):
        chat.read_documents(path, toy, 50, 100)
    with pytest.raises(ValueError, match=":1: text needs a tokenizer, which this target does not have"):
        chat.read_documents(path, None, VOCABULARY, 100)
    path = write(tmp_path / "b.jsonl", {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})
    assert len(chat.read_documents(path, None, VOCABULARY, 100)[0]) == 1
