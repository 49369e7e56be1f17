import io
import zipfile

import numpy as np
import pytest

from dspark_jax.data import conversations, sources
from dspark_jax.data.conversations import Conversation, OnPolicyTokens

HELLO = ({"role": "user", "content": "Hello"},)


def test_both_names_and_blank_lines_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '\n{"id": 1, "conversations": [{"role": "user", "content": "Hello"}]}\n  \n'
        '{"id": "b", "source": "s", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}'
    )
    first, second = conversations.read_conversations(path)
    assert first == Conversation(1, "", HELLO)
    assert second == Conversation("b", "s", ({"role": "system", "content": "x"}, {"role": "user", "content": "y"}))


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "a.jsonl"
    written = [
        Conversation(
            "é/1", "s", ({"role": "user", "content": "ligne\n\u2028 deux 🙂"}, {"role": "assistant", "content": ""})
        )
    ]
    conversations.write_conversations(path, written)
    assert list(conversations.read_conversations(path)) == written
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        ("[1]", "list found; allowed: an object"),
        ('{"messages": []}', "field id: None found; allowed: text or an integer"),
        ('{"id": true, "messages": []}', "field id: True"),
        ('{"id": 1}', "field conversations: missing; allowed: a list of"),
        ('{"id": 1, "messages": [], "conversations": []}', "given twice"),
        ('{"id": 1, "messages": []}', "field messages: at least one"),
        ('{"id": 1, "messages": "hi"}', "field messages: at least one"),
        ('{"id": 1, "conversations": ["hi"]}', r"field conversations\[0\]: str found; allowed:"),
        (
            '{"id": 1, "conversations": [{"from": "human", "value": "hi"}]}',
            r"field conversations\[0\].role: None found; allowed: system, user",
        ),
        (
            '{"id": 1, "conversations": [{"role": "user", "content": 3}]}',
            r"field conversations\[0\].content: int found; allowed: text",
        ),
        ('{"id": 1, "conversations": [{"role": "user", "content": ""}]}', r"field conversations\[0\].content: empty"),
        (
            '{"id": 1, "conversations": [{"role": "assistant", "content": "x"}]}',
            "first message after the system's is not the user's",
        ),
        ('{"id": 1, "source": 4, "conversations": []}', "field source: 4 found; allowed: text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    good = b'{"id": 1, "messages": [{"role": "user", "content": "x"}]}\n'
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ValueError, match=message) as raised:
        list(conversations.read_conversations(path))
    assert str(raised.value).startswith(f"{path}:2: ")


def _tokens(**changes):
    arrays = dict(
        tokens=np.array([5, 6, 7, 8, 9], np.uint16),
        prompt_len=np.array([2, 1], np.uint16),
        answer_len=np.array([2, 0], np.uint16),
        temperature=np.array([0, 0.7], np.float32),
        source=np.array(["a", "bc"]),
    )
    return OnPolicyTokens(**arrays | changes)


def test_tokens_round_trip_merge_and_pack(tmp_path):
    tokens = _tokens()
    tokens.save(tmp_path / "t.npz")
    back = OnPolicyTokens.load(tmp_path / "t.npz")
    assert len(back) == 2
    assert [a.tolist() for a in back.conversation(0)] == [[5, 6], [7, 8]]
    assert [a.tolist() for a in back.conversation(1)] == [[9], []]
    rows = [([5, 6], [7, 8], 0, "a"), ([9], [], 0.7, "bc")]
    packed = OnPolicyTokens.pack(rows)
    merged = OnPolicyTokens.merge([tokens, back])
    for name in ("tokens", "prompt_len", "answer_len", "temperature", "source"):
        want = getattr(tokens, name)
        assert getattr(packed, name).dtype == want.dtype
        np.testing.assert_array_equal(getattr(packed, name), want)
        np.testing.assert_array_equal(getattr(merged, name), np.concatenate([want, want]))
    assert OnPolicyTokens.pack([([70_000], [1], 1.0, "")]).tokens.dtype == np.uint32
    assert len(OnPolicyTokens.pack([])) == 0


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tokens=np.arange(4, dtype=np.uint16)), "tokens: 4 entries; allowed: 5"),
        (dict(tokens=np.arange(5)), r"tokens: int64\[5\] found; allowed: one dimension of uint16 or uint32"),
        (dict(answer_len=np.array([2], np.uint16)), "answer_len: 1 entries; allowed: 2"),
        (dict(prompt_len=np.array([3, 0], np.uint16)), "prompt_len: 0 found"),
        (dict(temperature=np.array([0, np.nan], np.float32)), "temperature"),
        (dict(source=np.array([1, 2])), "source: int64"),
        (dict(source=None), "source: NoneType found"),
    ],
)
def test_arrays_that_do_not_belong_together(changes, message):
    with pytest.raises(ValueError, match=message):
        _tokens(**changes)


def test_pack_names_the_row():
    with pytest.raises(ValueError, match="row 1: answer tokens"):
        OnPolicyTokens.pack([([1], [2], 0, ""), ([1], [-2], 0, "")])


def test_bad_token_files_are_named(tmp_path):
    path = tmp_path / "t.npz"
    with pytest.raises(FileNotFoundError):
        OnPolicyTokens.load(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=f"^{path}: damaged"):
        OnPolicyTokens.load(path)
    np.savez(path, tokens=np.zeros(1, np.uint16))
    with pytest.raises(ValueError, match=f"^{path}: prompt_len: missing; allowed: arrays tokens"):
        OnPolicyTokens.load(path)
    np.savez(path, tokens=np.array([object()]))
    with pytest.raises(ValueError, match=f"^{path}: tokens: its header says object"):
        OnPolicyTokens.load(path)
    _tokens().save(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=f"^{path}: "):
        OnPolicyTokens.load(path)


def test_a_header_that_claims_more_than_there_is_allocates_nothing(tmp_path):
    path = tmp_path / "t.npz"
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<u2", "fortran_order": False, "shape": (2**45,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tokens.npy", member.getvalue())
    with pytest.raises(ValueError, match="tokens: its header says uint16"):
        OnPolicyTokens.load(path)


def test_the_shipped_tokens():
    tokens = OnPolicyTokens.load(sources.SHIPPED_TOKENS)
    assert len(tokens) == 2688 and tokens.answer_len.sum() == 353_865
    assert tokens.tokens.max() < 49_152
    for i in (0, 1000, 2175):
        prompt, answer = tokens.conversation(i)
        assert prompt[0] == 1 and prompt[-1] == 198 and 0 < len(answer) <= 192
