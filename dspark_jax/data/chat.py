"""Chat data -> documents: JSON lines become tokens with a loss mask over what the assistant said.

A row is one of, the first that fits:
    {"input_ids": [...], "loss_mask": [...]}        taken as it is
    {"conversations": [...]} or {"messages": [...]} through the target's chat template (`Tokenizer.conversation`); forms
                                                    of messages as in `dspark_jax.data.conversations`
    {"text": "..."}                                 text with control tokens already in it, all of it supervised
each with "source", where it came from, if that is known. What cannot be read is an error that names file and line, what
cannot be used is dropped and counted.
"""

import collections.abc
import dataclasses
import itertools

import numpy as np

from dspark_jax.data.conversations import parse_messages, parse_source, read_rows
from dspark_jax.data.documents import Documents

TOO_SHORT = "fewer than 2 tokens"
NO_ANCHOR = "no two supervised tokens in a row where a block could start"


@dataclasses.dataclass
class Report:
    """What became of the rows of a file.

    Attributes:
      path, max_length: the file, and the tokens after which documents were cut.
      kept, truncated: documents, and how many of them were cut.
      dropped: {reason: (rows, line number of the first)}.
    """

    path: object
    max_length: int
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def drop(self, reason, line):
        count, first = self.dropped.get(reason, (0, line))
        self.dropped[reason] = count + 1, first

    def __str__(self):
        lines = [f"{self.path}: {self.kept} documents, {self.truncated} of them cut after {self.max_length} tokens"]
        lines += [f"dropped: {count} rows with {reason}, the first in line {line}"
                  for reason, (count, line) in self.dropped.items()]
        return "\n".join(lines)


def read_documents(path, tokenizer, vocab_size: int, max_length: int, count: int | None = None,
                   progress: collections.abc.Callable = iter) -> tuple[Documents, Report]:
    """The documents of a JSON lines file, each cut after ``max_length`` tokens.

    Args:
      path: the file.
      tokenizer: the target's `Tokenizer`, or None, which allows rows of ids only.
      vocab_size: of the target; ids must be smaller.
      max_length: at least 2.
      count: read until there are so many documents; None: all rows.
      progress: is given the iterator of rows, for instance `tqdm.tqdm`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a row that cannot be read ("path:line: field: what is wrong; allowed ..."), or no document is left.
    """
    report = Report(path, max_length)
    documents = Documents.pack(itertools.islice(
        _documents(path, tokenizer, vocab_size, max_length, report, progress), count))
    report.kept = len(documents)
    if not len(documents):
        why = "; ".join(str(report).splitlines()[1:]) or "the file holds no rows"
        raise ValueError(f"{path}: no document to train on: {why}")
    return documents, report


def _documents(path, tokenizer, vocab_size, max_length, report, progress):
    for line, row in progress(read_rows(path)):
        try:
            # One token more than is used tells whether anything was cut.
            ids, mask = _read_row(row, tokenizer, max_length + 1)
            if len(ids) and ids.max() >= vocab_size:
                raise ValueError(f"token id {ids.max()}; allowed: the target's vocabulary, [0, {vocab_size})")
            source = parse_source(row)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None
        cut = len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        if len(ids) < 2:
            report.drop(TOO_SHORT, line)
        elif not (mask[:-1] & mask[1:]).any():
            report.drop(f"{NO_ANCHOR}, in the first {max_length} tokens" if cut else NO_ANCHOR, line)
        else:
            report.truncated += cut
            yield ids, mask, source


def parse_ids(row: dict, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The first ``limit`` ids (int64 [S]) and loss mask (bool [S]) of a row that has both. The first token, which has
    nothing before it, is never supervised. Raises ValueError naming the field."""
    ids = _array(row, "input_ids", "i", "token ids")
    mask = _array(row, "loss_mask", "bif", "zeros and ones")
    if len(ids) != len(mask):
        raise ValueError(f"field loss_mask: {len(mask)} entries; allowed: {len(ids)}, as input_ids has")
    if len(ids) and ids.min() < 0:
        raise ValueError(f"field input_ids: {ids.min()} found; allowed: token ids, which are not negative")
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("field loss_mask: allowed: zeros and ones")
    mask = mask.astype(bool)
    mask[:1] = False
    return ids[:limit].astype(np.int64), mask[:limit]


def _array(row, name, kinds, what):
    try:
        array = np.asarray(values := row.get(name))
        fits = isinstance(values, list) and array.ndim == 1 and (not values or array.dtype.kind in kinds)
    except ValueError:  # lists of different lengths
        fits = False
    if not fits:
        raise ValueError(f"field {name}: allowed: a list of {what}")
    return array


def _read_row(row, tokenizer, limit) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64, mask bool) of a row, at most ``limit`` of them. Raises ValueError naming the field."""
    if "input_ids" in row:
        return parse_ids(row, limit)
    if not {"conversations", "messages", "text"} & row.keys():
        raise ValueError("no field to read; allowed: conversations, messages, text, or input_ids with loss_mask")
    if tokenizer is None:
        raise ValueError("text needs a tokenizer, which this target does not have; allowed: input_ids with loss_mask")
    if "conversations" in row or "messages" in row:
        ids, mask = tokenizer.conversation(parse_messages(row), limit)
    else:
        if not isinstance(row["text"], str):
            raise ValueError(f"field text: {type(row['text']).__name__} found; allowed: text")
        ids = tokenizer.encode(row["text"], control_tokens=True)[:limit]
        mask = [i > 0 for i in range(len(ids))]
    return np.array(ids, np.int64), np.array(mask, bool)
