"""The reader of safetensors directories: what is damaged or lies is refused, before memory is taken."""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import public_pairs as public
from dspark_jax.checkpoints import safetensors_files as files

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1, -2], np.int64),
    "c": np.array([True, False, True]),
    "d": np.array([0.5, 3.0], np.float16),
    "e": np.zeros((0, 4), np.float32),
    "f": np.array(7.0, np.float32),
    "g": np.array([1.5, -3.0, 2.0], ml_dtypes.bfloat16),
}


def test_reads_what_the_formats_own_library_wrote(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    found = files.read_directory(tmp_path)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        mapped = found[name].map()
        assert mapped.dtype == array.dtype and mapped.shape == array.shape and np.array_equal(mapped, array)
        assert not mapped.flags.writeable or mapped.size == 0


def test_the_formats_own_library_reads_what_we_write(tmp_path):
    files.write_file(tmp_path / "model.safetensors", ARRAYS)
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert all(t.offset % files.DTYPES[t.dtype].itemsize == 0 for t in files.read_directory(tmp_path).values())


def raw(file, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD = {
    "empty file": (lambda f: f.write_bytes(b""), "8 bytes"),
    "no header": (lambda f: f.write_bytes(b"\0" * 7), "8 bytes"),
    "header longer than the file": (lambda f: raw(f, {}, length=1 << 40), "header length"),
    "header length of all ones": (lambda f: raw(f, {}, length=2**64 - 1), "header length"),
    "header cut": (lambda f: raw(f, {"a": entry([1], 0, 4)}, b"1234", length=20), "not JSON"),
    "header too long by one": (lambda f: raw(f, {"a": entry([1], 0, 4)}, b"1234",
                                             len(json.dumps({"a": entry([1], 0, 4)})) + 1), "not JSON"),
    "not JSON": (lambda f: raw(f, b"{nonsense}"), "not JSON"),
    "not UTF-8": (lambda f: raw(f, b'{"\xff": 1}'), "not JSON"),
    "a list": (lambda f: raw(f, []), "header"),
    "deep": (lambda f: raw(f, b"[" * 100_000), "not JSON"),
    "a tensor twice": (lambda f: raw(f, b'{"a": 1, "a": 2}'), "'a' occurs twice"),
    "entry is a number": (lambda f: raw(f, {"a": 3}), "'a'"),
    "entry lacks a field": (lambda f: raw(f, {"a": {"dtype": "F32", "shape": [1]}}), "'a'"),
    "unknown dtype": (lambda f: raw(f, {"a": entry([1], 0, 4, "F99")}, b"1234"), "F99"),
    "negative size": (lambda f: raw(f, {"a": entry([-1], 0, 4)}, b"1234"), "shape"),
    "fractional size": (lambda f: raw(f, {"a": entry([1.0], 0, 4)}, b"1234"), "shape"),
    "true as a size": (lambda f: raw(f, {"a": entry([True], 0, 4)}, b"1234"), "shape"),
    "offsets leave the file": (lambda f: raw(f, {"a": entry([2], 0, 8)}, b"1234"), "data_offsets"),
    "offsets descend": (lambda f: raw(f, {"a": entry([1], 4, 0)}, b"1234"), "data_offsets"),
    "negative offsets": (lambda f: raw(f, {"a": entry([1], -4, 0)}, b"1234"), "data_offsets"),
    "three offsets": (lambda f: raw(f, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"1234"),
                      "data_offsets"),
    "a shape larger than its bytes": (lambda f: raw(f, {"a": entry([1 << 40], 0, 4)}, b"1234"), "needs"),
    "a shape that overflows": (lambda f: raw(f, {"a": entry([1 << 62, 1 << 62], 0, 4)}, b"1234"), "needs"),
    "overlap": (lambda f: raw(f, {"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"12345678"), "overlaps"),
    "gap": (lambda f: raw(f, {"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"123456789012"), "gap"),
    "gap at the start": (lambda f: raw(f, {"a": entry([1], 4, 8)}, b"12345678"), "gap"),
    "data behind the last tensor": (lambda f: raw(f, {"a": entry([1], 0, 4)}, b"12345678"), "8 bytes of data"),
    "file cut": (lambda f: raw(f, {"a": entry([2], 0, 8)}, b"1234567"), "within the 7 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_name_file_and_tensor(case, tmp_path):
    write, part = BAD[case]
    file = tmp_path / "model.safetensors"
    write(file)
    tracemalloc.start()
    message = public.refusal(files.read_directory, tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message.startswith(str(file)) and part in message
    assert most < 1 << 20  # bytes: no memory for what is not there


def shards(folder, weight_map, **contents):
    for name, arrays in contents.items():
        safetensors.numpy.save_file(arrays, folder / f"{name}.safetensors")
    (folder / files.INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_shards_read_as_one(tmp_path):
    shards(tmp_path, {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"},
           x={"a": ARRAYS["a"], "b": ARRAYS["b"]}, y={"c": ARRAYS["c"]})
    found = files.read_directory(tmp_path)
    assert {name: t.file.name for name, t in found.items()} == {
        "a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    assert np.array_equal(found["c"].map(), ARRAYS["c"])


@pytest.mark.parametrize("file", [
    "missing.safetensors", "../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "C:\\x", 3, None])
def test_an_index_names_only_files_beside_it(file, tmp_path):
    (tmp_path / "in").mkdir()
    safetensors.numpy.save_file({"a": ARRAYS["a"]}, tmp_path / "x.safetensors")  # reachable, but outside
    shards(tmp_path / "in", {"a": "x.safetensors", "b": file}, x={"a": ARRAYS["a"]})
    message = public.refusal(files.read_directory, tmp_path / "in")
    assert message.startswith(f"{tmp_path / 'in' / files.INDEX}: weight_map['b']: ")


def test_index_and_shards_must_agree(tmp_path):
    shards(tmp_path, {"a": "x.safetensors"}, x={"a": ARRAYS["a"], "b": ARRAYS["b"]})
    with pytest.raises(ValueError, match="x.safetensors: tensor 'b' is not where"):
        files.read_directory(tmp_path)
    shards(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"}, x={"a": ARRAYS["a"]})
    with pytest.raises(ValueError, match="x.safetensors: tensor 'b' is missing"):
        files.read_directory(tmp_path)
    for text in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "no"):
        (tmp_path / files.INDEX).write_text(text)
        with pytest.raises(ValueError, match="index.json: "):
            files.read_directory(tmp_path)


def test_weights_in_two_places_or_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights"):
        files.read_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")  # never looked at
    with pytest.raises(FileNotFoundError, match="no weights"):
        files.read_directory(tmp_path)
    shards(tmp_path, {"a": "x.safetensors"}, x={"a": ARRAYS["a"]})
    safetensors.numpy.save_file({"a": ARRAYS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="both"):
        files.read_directory(tmp_path)
