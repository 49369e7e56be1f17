import io
import zipfile

import numpy as np
import pytest

from dspark_jax.data import sources
from dspark_jax.data.documents import Documents

ROWS = [([5, 6, 7, 8], [0, 0, 1, 1], "a"), ([9], [0], "bc"), ([4, 5, 6], [False, True, False], "a")]


def _documents(**changes):
    arrays = dict(
        tokens=np.array([5, 6, 7, 8, 9, 4, 5, 6], np.uint16),
        loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 0], bool),
        length=np.array([4, 1, 3], np.uint16),
        source=np.array(["a", "bc", "a"]),
    )
    return Documents(**arrays | changes)


def _same(a, b):
    for name in ("tokens", "loss_mask", "length", "source"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_packed_written_and_read_back(tmp_path):
    documents = _documents()
    _same(Documents.pack(ROWS), documents)
    documents.save(tmp_path / "t.npz")
    assert list(tmp_path.iterdir()) == [tmp_path / "t.npz"]
    _same(Documents.load(tmp_path / "t.npz"), documents)
    assert [a.tolist() for a in documents.document(0)] == [[5, 6, 7, 8], [False, False, True, True]]
    assert [a.tolist() for a in documents.document(2)] == [[4, 5, 6], [False, True, False]]
    _same(documents.first(2), Documents.pack(ROWS[:2]))
    _same(documents.where([True, True, False]), documents.first(2))
    assert documents.where([False, False, True]).document(0)[0].tolist() == [4, 5, 6]
    assert len(documents.where([False] * 3)) == 0
    assert len(documents.first(9)) == 3 and len(Documents.pack([])) == 0
    assert Documents.pack([([70_000], [0], "")]).tokens.dtype == np.uint32


def test_files_of_prompts_and_answers_are_read(tmp_path):
    arrays = dict(tokens=np.arange(6, dtype=np.uint16), prompt_len=np.array([2, 1], np.uint16),
                  answer_len=np.array([3, 0], np.uint16), temperature=np.zeros(2, np.float32),
                  source=np.array(["a", "b"]))
    np.savez(tmp_path / "t.npz", **arrays)
    _same(Documents.load(tmp_path / "t.npz"), Documents.pack([(range(5), [0, 0, 1, 1, 1], "a"), ([5], [0], "b")]))
    for changes, message in (
        (dict(prompt_len=np.array([5, 0], np.uint16)), "prompt_len: 0 found"),
        (dict(answer_len=np.array([3], np.uint16)), "answer_len: 1 entries; allowed: 2"),
        (dict(answer_len=np.array([3.0, 0])), "answer_len: float64"),
        (dict(tokens=np.arange(5, dtype=np.uint16)), "tokens: 5 entries; allowed: 6"),
    ):
        np.savez(tmp_path / "t.npz", **arrays | changes)
        with pytest.raises(ValueError, match=f"^{tmp_path / 't.npz'}: {message}"):
            Documents.load(tmp_path / "t.npz")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tokens=np.arange(4, dtype=np.uint16)), "tokens: 4 entries; allowed: 8"),
        (dict(loss_mask=np.zeros(9, bool)), "loss_mask: 9 entries; allowed: 8"),
        (dict(tokens=np.arange(8)), r"tokens: int64\[8\] found; allowed: one dimension of uint16 or uint32"),
        (dict(loss_mask=np.zeros(8)), r"loss_mask: float64\[8\] found; allowed: one dimension of bool"),
        (dict(length=np.array([8, 0, 0], np.uint16)), "length: 0 found"),
        (dict(source=np.array(["a"])), "source: 1 entries; allowed: 3"),
        (dict(source=None), "source: NoneType found"),
        (dict(loss_mask=np.ones(8, bool)), "loss_mask: the first token of a document is supervised"),
    ],
)
def test_arrays_that_do_not_belong_together(changes, message):
    with pytest.raises(ValueError, match=message):
        _documents(**changes)


def test_pack_names_the_row():
    for row, message in ((([1, -2], [0, 1], ""), "tokens"), (([1.5], [0], ""), "tokens"), (([], [], ""), "tokens"),
                         (([1, 2], [1], ""), "loss_mask: 1 entries for 2 tokens")):
        with pytest.raises(ValueError, match=f"row 1: {message}"):
            Documents.pack([([1], [0], ""), row])


def test_bad_token_files_are_named(tmp_path):
    path = tmp_path / "t.npz"
    with pytest.raises(FileNotFoundError):
        Documents.load(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=f"^{path}: damaged"):
        Documents.load(path)
    np.savez(path, tokens=np.zeros(1, np.uint16))
    with pytest.raises(ValueError, match=f"^{path}: loss_mask: missing; allowed: arrays tokens"):
        Documents.load(path)
    np.savez(path, tokens=np.array([object()]))
    with pytest.raises(ValueError, match=f"^{path}: tokens: its header says object"):
        Documents.load(path)
    _documents().save(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=f"^{path}: "):
        Documents.load(path)


def test_a_header_that_claims_more_than_there_is_allocates_nothing(tmp_path):
    path = tmp_path / "t.npz"
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<u2", "fortran_order": False, "shape": (2**45,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tokens.npy", member.getvalue())
    with pytest.raises(ValueError, match="tokens: its header says uint16"):
        Documents.load(path)


def test_the_shipped_tokens():
    shipped = Documents.load(sources.SHIPPED_TOKENS)
    assert len(shipped) == 5376 and shipped.loss_mask.sum() == 670_462
    assert shipped.tokens.max() < 49_152
    for i in (0, 1000, 2175, 3967, 5375):
        tokens, loss_mask = shipped.document(i)
        prompt, answer = tokens[~loss_mask], tokens[loss_mask]
        assert prompt[0] == 1 and prompt[-1] == 198 and 0 < len(answer) <= 192 and tokens[-1] == answer[-1]
