"""Conversations as JSON lines, and the token file that a drafter is trained on.

JSON lines: one object a line, {"id", "conversations": [{"role", "content"}, ...]}, with "messages" as another name of
the list and "source" as an optional third field. Token file: prompts and the target's own answers as ids, one after the
other in one array (see `OnPolicyTokens`).
"""

import collections.abc
import dataclasses
import functools
import json
import os
import pathlib
import zipfile

import numpy as np

from dspark_jax.tokenizer import check_messages


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
    source = row.get("source", "")
    if not isinstance(source, str):
        raise ValueError(f"field source: {source!r} found; allowed: text")
    names = [name for name in ("conversations", "messages") if name in row]
    if len(names) != 1:
        raise ValueError(
            f"field conversations: {'missing' if not names else 'given twice, also as messages'}; "
            'allowed: a list of {"role", "content"} named conversations or messages'
        )
    messages = row[names[0]]
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
    return Conversation(identity, source, tuple({"role": m["role"], "content": m["content"]} for m in messages))


def write_conversations(path, conversations: collections.abc.Iterable[Conversation]) -> None:
    """Writes a JSON lines file that `read_conversations` reads back; an older file is replaced only when the new one is
    complete."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for c in conversations:
            row = {"id": c.id, "source": c.source, "conversations": list(c.messages)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, path)


@dataclasses.dataclass(frozen=True, eq=False)
class OnPolicyTokens:
    """Prompts and a target's own answers as token ids, N conversations one after the other.

    Attributes:
      tokens: [sum of all lengths] uint16 or uint32; each prompt is followed by its answer, the end token included where
          the answer ended.
      prompt_len, answer_len: [N] uint16 or uint32.
      temperature: [N] float32, at which the answer was sampled; 0 is greedy.
      source: [N] str, where the prompt came from.

    Raises:
      ValueError: the arrays do not belong together; names the array and what is allowed.
    """

    tokens: np.ndarray
    prompt_len: np.ndarray
    answer_len: np.ndarray
    temperature: np.ndarray
    source: np.ndarray

    def __post_init__(self):
        for name, kinds in _ARRAYS.items():
            array = getattr(self, name)
            if (
                not isinstance(array, np.ndarray)
                or array.ndim != 1
                or not any(np.issubdtype(array.dtype, k) for k in kinds)
            ):
                found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ValueError(
                    f"{name}: {found} found; allowed: one dimension of {' or '.join(k.__name__ for k in kinds)}"
                )
        count = len(self.prompt_len)
        for name in ("answer_len", "temperature", "source"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name}: {len(getattr(self, name))} entries; allowed: {count}, as prompt_len has")
        if count and self.prompt_len.min() < 1:
            raise ValueError("prompt_len: 0 found; allowed: at least 1")
        if not np.all(np.isfinite(self.temperature) & (self.temperature >= 0)):
            raise ValueError("temperature: a negative or infinite value found; allowed: 0 (greedy) or more")
        if (total := int(self.starts[-1])) != len(self.tokens):
            raise ValueError(
                f"tokens: {len(self.tokens)} entries; allowed: {total}, the sum of prompt_len and answer_len"
            )

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """[N + 1] int64: conversation i is tokens[starts[i] : starts[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.prompt_len.astype(np.int64) + self.answer_len.astype(np.int64))])

    def __len__(self) -> int:
        return len(self.prompt_len)

    def conversation(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(prompt ids, answer ids) of conversation i, 0 <= i < N."""
        start = int(self.starts[i])
        middle = start + int(self.prompt_len[i])
        return self.tokens[start:middle], self.tokens[middle : middle + int(self.answer_len[i])]

    def first(self, count: int) -> "OnPolicyTokens":
        """The first ``count`` conversations (all, if there are fewer)."""
        count = min(count, len(self))
        return OnPolicyTokens(self.tokens[: self.starts[count]], *(
            getattr(self, name)[:count] for name in _ARRAYS if name != "tokens"))

    def save(self, path) -> None:
        """Writes a compressed .npz; an older file is replaced only when the new one is complete."""
        path = pathlib.Path(path)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in _ARRAYS})
        os.replace(partial, path)

    @classmethod
    def load(cls, path) -> "OnPolicyTokens":
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no such file, or its arrays do not belong together; the message starts with the path.
        """
        with open(path, "rb") as raw:  # FileNotFoundError names the file
            try:
                with zipfile.ZipFile(raw) as file:
                    return cls(**{name: _read_array(file, name) for name in _ARRAYS})
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            except Exception as error:
                # A damaged archive fails in many ways: zlib, end of file, encryption flags, impossible offsets.
                raise ValueError(f"{path}: damaged, or not an .npz file ({error})") from None

    @classmethod
    def pack(cls, rows: collections.abc.Iterable[tuple]) -> "OnPolicyTokens":
        """From rows of (prompt ids, answer ids, temperature, source). Raises ValueError naming the row."""
        prompts, answers, temperatures, sources = [], [], [], []
        for i, (prompt, answer, temperature, source) in enumerate(rows):
            for name, ids in (("prompt", prompt), ("answer", answer)):
                if not all(type(t) is int and 0 <= t < 2**32 for t in ids):
                    raise ValueError(f"row {i}: {name} tokens: allowed: integers from 0 to 2**32 - 1")
            prompts.append(prompt)
            answers.append(answer)
            temperatures.append(temperature)
            sources.append(source)
        tokens = [t for prompt, answer in zip(prompts, answers) for t in (*prompt, *answer)]
        return cls(
            tokens=_small(tokens),
            prompt_len=_small([len(p) for p in prompts]),
            answer_len=_small([len(a) for a in answers]),
            temperature=np.array(temperatures, np.float32),
            source=np.array(sources, np.str_),
        )

    @classmethod
    def merge(cls, parts: collections.abc.Sequence["OnPolicyTokens"]) -> "OnPolicyTokens":
        """All conversations of `parts`, in order."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS})


_ARRAYS = {  # name -> allowed kinds of dtype
    "tokens": (np.uint16, np.uint32),
    "prompt_len": (np.uint16, np.uint32),
    "answer_len": (np.uint16, np.uint32),
    "temperature": (np.float32,),
    "source": (np.str_,),
}


_MEMBER_LIMIT = 1 << 32  # bytes, unpacked


def _small(values):
    """The smallest of uint16 and uint32 that holds the values."""
    return np.array(values, np.uint16 if max(values, default=0) < 2**16 else np.uint32)


def _read_array(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array of an .npz. Its header is compared with the member's size first: a header may claim any shape, and
    numpy allocates what it claims."""
    try:
        info = file.getinfo(f"{name}.npy")
    except KeyError:
        raise ValueError(f"{name}: missing; allowed: arrays {', '.join(_ARRAYS)}") from None
    if info.file_size > _MEMBER_LIMIT:
        raise ValueError(f"{name}: {info.file_size} bytes; allowed: at most {_MEMBER_LIMIT}")
    with file.open(info) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(member)
        if dtype.hasobject or len(shape) != 1 or member.tell() + shape[0] * dtype.itemsize != info.file_size:
            raise ValueError(f"{name}: its header says {dtype}{list(shape)}, which is not what the file holds")
    with file.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)
