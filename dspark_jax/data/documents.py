"""What a drafter is trained on: token sequences with a loss mask, in memory and as a token file (.npz)."""

import collections.abc
import dataclasses
import functools
import zipfile

import numpy as np

from dspark_jax.whole_files import replacing


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """N token sequences one after the other, each with a mask of the tokens that a drafter learns to predict: those the
    target itself wrote, or should have written.

    Attributes:
      tokens: [sum of all lengths] uint16 or uint32.
      loss_mask: [sum of all lengths] bool. The first token of a document is never supervised: nothing is before it.
      length: [N] uint16 or uint32, at least 1.
      source: [N] str, where a document came from.

    Raises:
      ValueError: the arrays do not belong together; names the array and what is allowed.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    length: np.ndarray
    source: np.ndarray

    def __post_init__(self):
        _check_kinds({name: getattr(self, name) for name in _ARRAYS}, _ARRAYS)
        if len(self.source) != len(self.length):
            raise ValueError(f"source: {len(self.source)} entries; allowed: {len(self.length)}, as length has")
        if len(self) and self.length.min() < 1:
            raise ValueError("length: 0 found; allowed: at least 1")
        for name in ("tokens", "loss_mask"):
            if (found := len(getattr(self, name))) != (total := int(self.starts[-1])):
                raise ValueError(f"{name}: {found} entries; allowed: {total}, the sum of length")
        if self.loss_mask[self.starts[:-1]].any():
            raise ValueError("loss_mask: the first token of a document is supervised; allowed: those behind it")

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """[N + 1] int64: document i is tokens[starts[i] : starts[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.length.astype(np.int64))])

    def __len__(self) -> int:
        return len(self.length)

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, loss mask) of document i, 0 <= i < N."""
        where = slice(int(self.starts[i]), int(self.starts[i + 1]))
        return self.tokens[where], self.loss_mask[where]

    def first(self, count: int) -> "Documents":
        """The first ``count`` documents (all, if there are fewer)."""
        count = min(count, len(self))
        end = self.starts[count]
        return Documents(self.tokens[:end], self.loss_mask[:end], self.length[:count], self.source[:count])

    def where(self, chosen: collections.abc.Sequence[bool]) -> "Documents":
        """The documents i for which ``chosen[i]`` is true."""
        chosen = np.asarray(chosen, bool)
        tokens = np.repeat(chosen, self.length)
        return Documents(self.tokens[tokens], self.loss_mask[tokens], self.length[chosen], self.source[chosen])

    def save(self, path) -> None:
        """Writes a compressed .npz; an older file is replaced only when the new one is complete."""
        with replacing(path) as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in _ARRAYS})

    @classmethod
    def load(cls, path) -> "Documents":
        """Reads what `save` wrote, or an older file of prompts with one answer each: prompt_len and answer_len in place
        of loss_mask and length.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no such file, or its arrays do not belong together; the message starts with the path.
        """
        with open(path, "rb") as raw:  # FileNotFoundError names the file
            try:
                with zipfile.ZipFile(raw) as file:
                    if "prompt_len.npy" in file.namelist():
                        return cls._from_answers({name: _read_array(file, name) for name in _ANSWER_ARRAYS})
                    return cls(**{name: _read_array(file, name) for name in _ARRAYS})
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            except Exception as error:
                # A damaged archive fails in many ways: zlib, end of file, encryption flags, impossible offsets.
                raise ValueError(f"{path}: damaged, or not an .npz file ({error})") from None

    @classmethod
    def _from_answers(cls, arrays):
        _check_kinds(arrays, _ANSWER_ARRAYS)
        prompt, answer = (arrays[name].astype(np.int64) for name in ("prompt_len", "answer_len"))
        if len(prompt) != len(answer):
            raise ValueError(f"answer_len: {len(answer)} entries; allowed: {len(prompt)}, as prompt_len has")
        if len(prompt) and prompt.min() < 1:
            raise ValueError("prompt_len: 0 found; allowed: at least 1")
        parts = np.stack([prompt, answer], axis=-1).reshape(-1)
        loss_mask = np.repeat(np.arange(len(parts)) % 2 == 1, parts)
        return cls(arrays["tokens"], loss_mask, _small(prompt + answer), arrays["source"])

    @classmethod
    def pack(cls, rows: collections.abc.Iterable[tuple]) -> "Documents":
        """From rows of (token ids, loss mask, source). Raises ValueError naming the row."""
        tokens, masks, lengths, sources = [np.zeros(0, np.uint32)], [np.zeros(0, bool)], [], []
        for i, (ids, mask, source) in enumerate(rows):
            ids = np.asarray(ids)
            if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**32:
                raise ValueError(f"row {i}: tokens: allowed: integers from 0 to 2**32 - 1, at least one")
            if len(mask) != len(ids):
                raise ValueError(f"row {i}: loss_mask: {len(mask)} entries for {len(ids)} tokens")
            tokens.append(ids.astype(np.uint32))
            masks.append(np.asarray(mask, bool))
            lengths.append(len(ids))
            sources.append(source)
        return cls(_small(np.concatenate(tokens)), np.concatenate(masks), _small(np.array(lengths, np.int64)),
                   np.array(sources, np.str_))


_INTEGERS = (np.uint16, np.uint32)
# name -> allowed kinds of dtype
_ARRAYS = {"tokens": _INTEGERS, "loss_mask": (np.bool_,), "length": _INTEGERS, "source": (np.str_,)}
_ANSWER_ARRAYS = {"tokens": _INTEGERS, "prompt_len": _INTEGERS, "answer_len": _INTEGERS, "source": (np.str_,)}
_MEMBER_LIMIT = 1 << 32  # bytes, unpacked


def _check_kinds(arrays, kinds):
    for name, allowed in kinds.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not any(
                np.issubdtype(array.dtype, kind) for kind in allowed):
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(
                f"{name}: {found} found; allowed: one dimension of {' or '.join(kind.__name__ for kind in allowed)}")


def _small(values):
    """The smallest of uint16 and uint32 that holds the values."""
    return values.astype(np.uint16 if values.max(initial=0) < 2**16 else np.uint32)


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
