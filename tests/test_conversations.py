import pytest

from dspark_jax.data import conversations
from dspark_jax.data.conversations import Conversation

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


def test_sharegpt_is_another_form_of_the_same():
    said = [("system", "s"), ("human", "u"), ("gpt", "a"), ("user", "v"), ("assistant", "")]
    messages = conversations.parse_messages({"conversations": [{"from": who, "value": what} for who, what in said]})
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert messages == tuple({"role": role, "content": what} for role, (_, what) in zip(roles, said))


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
            '{"id": 1, "conversations": [{"speaker": "human", "value": "hi"}]}',
            r"field conversations\[0\].role: None found; allowed: system, user",
        ),
        (
            '{"id": 1, "conversations": [{"from": "bard", "value": "hi"}]}',
            r"field conversations\[0\].from: 'bard' found; allowed: human, gpt, system, user, assistant, tool",
        ),
        (
            '{"id": 1, "messages": [{"from": "human"}]}',
            r"field messages\[0\].content: NoneType found; allowed: text",
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
