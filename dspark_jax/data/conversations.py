"""Conversations as JSON lines.

One object a line, {"id", "conversations": [{"role", "content"}, ...]}, with "messages" as another name of the list,
ShareGPT's {"from", "value"} as another form of its entries, and "source" as an optional third field.
"""

import collections.abc
import dataclasses
import json

from dspark_jax.tokenizer import ROLES, check_messages
from dspark_jax.whole_files import replacing

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation, or a prompt: then the last message is the one to answer.

    Attributes:
      id: text or number, unique in its file.
      source: where it came from, "" if unknown.
      messages: tuple of {"role", "content"}.
    """

    id: str | int
    source: str
    messages: tuple[dict, ...]


def read_conversations(path) -> collections.abc.Iterator[Conversation]:
    """The conversations of a JSON lines file, one by one; blank lines are passed over.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a conversation; the message is "path:line: field: what is wrong; allowed ...".
    """
    for number, row in read_rows(path):
        try:
            yield parse_conversation(row)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None


def read_rows(path) -> collections.abc.Iterator[tuple[int, dict]]:
    """(line number from 1, JSON object) of each line that is not blank. Raises as `read_conversations`."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not JSON ({error}); allowed: one object a line") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: {type(row).__name__} found; allowed: an object")
            yield number, row


def parse_conversation(row: dict) -> Conversation:
    """The conversation that a JSON object describes. Raises ValueError naming the field."""
    identity = row.get("id")
    if isinstance(identity, bool) or not isinstance(identity, (str, int)) or identity == "":
        raise ValueError(f"field id: {identity!r} found; allowed: text or an integer")
    return Conversation(identity, parse_source(row), parse_messages(row))


def parse_source(row: dict) -> str:
    """The source of a JSON object, "" where it names none. Raises ValueError."""
    source = row.get("source", "")
    if not isinstance(source, str):
        raise ValueError(f"field source: {source!r} found; allowed: text")
    return source


def parse_messages(row: dict) -> tuple[dict, ...]:
    """The messages of a JSON object, as {"role", "content"}. Raises ValueError naming the field."""
    names = [name for name in ("conversations", "messages") if name in row]
    if len(names) != 1:
        raise ValueError(
            f"field conversations: {'missing' if not names else 'given twice, also as messages'}; "
            'allowed: a list of {"role", "content"} named conversations or messages'
        )
    messages = row[names[0]]
    if isinstance(messages, list):
        messages = [_from_sharegpt(f"{names[0]}[{i}]", message) for i, message in enumerate(messages)]
    try:
        check_messages(messages)
    except ValueError as error:
        raise ValueError(f"field {str(error).replace('messages', names[0], 1)}") from None
    for i, message in enumerate(messages):
        # An answer may be empty: a model can end at once.
        if not message["content"] and message["role"] != "assistant":
            raise ValueError(f"field {names[0]}[{i}].content: empty; allowed: text")
    if next((m["role"] for m in messages if m["role"] != "system"), None) != "user":
        raise ValueError(
            f"field {names[0]}: the first message after the system's is not the user's; allowed: user, then assistant"
        )
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def _from_sharegpt(where, message):
    """A {"from", "value"} as {"role", "content"}; anything else as it is."""
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise ValueError(f"field {where}.from: {speaker!r} found; allowed: {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[speaker], "content": message.get("value")}


def write_conversations(path, conversations: collections.abc.Iterable[Conversation]) -> None:
    """Writes a JSON lines file that `read_conversations` reads back; an older file is replaced only when the new one is
    complete."""
    with replacing(path, "w") as file:
        for c in conversations:
            row = {"id": c.id, "source": c.source, "conversations": list(c.messages)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
