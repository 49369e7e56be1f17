"""DeepSpec's target cache, format 2: reads back exactly what its own code wrote, and refuses what is damaged."""

import json
import shutil

import numpy as np
import pytest

import pairs
from dspark_jax.data import target_cache, target_cache_writer
from dspark_jax.data.target_cache import RECORD, TargetCache
from dspark_jax.data.target_cache_writer import Writer
from golden import GOLDENS

HIDDEN = ("target_hidden_states", "target_last_hidden_states")
TOKENS = ("input_ids", "attention_mask", "loss_mask")


def test_reads_back_exactly():
    cache, expected = TargetCache(GOLDENS / "dspark/cache_v2"), np.load(GOLDENS / "dspark/cache_v2/expected.npz")
    assert len(cache) == 3 and cache.target_layer_ids == (0, 2) and cache.hidden_size == 96 and cache.target == "target"
    assert cache.lengths.tolist() == expected["index_records"][:, 2].tolist()
    for i in range(3):
        sample = cache[i]
        for name in TOKENS:
            assert np.array_equal(getattr(sample, name), expected[f"s{i}.{name}"])
        for name in HIDDEN:
            stored = getattr(sample, name)
            assert np.array_equal(stored.view(np.uint16), expected[f"s{i}.{name}_bf16_bits"])
            assert np.array_equal(stored.astype(np.float32), expected[f"s{i}.{name}"])
    batch = cache.batch([0, 1, 2])
    for name in (*TOKENS, *HIDDEN):
        assert np.array_equal(batch[name], expected[f"batch.{name}"]), name
    assert np.array_equal(cache[-1].input_ids, cache[2].input_ids)
    with pytest.raises(IndexError):
        cache[3]


def test_record_layout():
    assert RECORD.itemsize == 56
    record = np.array([(1, 0, 3, 100, 112, 115, 118, 142)], RECORD)
    assert record.tobytes().hex() == (
        "0100000000000000" "00000000" "03000000" "6400000000000000" "7000000000000000" "7300000000000000"
        "7600000000000000" "8e00000000000000")


def edit_manifest(folder, **values):
    manifest = json.loads((folder / "manifest.json").read_text()) | values
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit_record(folder, i, **values):
    records = np.fromfile(folder / "samples.idx", RECORD)
    for name, value in values.items():
        records[name][i] = value
    records.tofile(folder / "samples.idx")


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


SHARD = [{"shard_id": 0, "file_name": "shard-00000.bin"}]
BAD = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
    "manifest is no JSON": (lambda f: (f / "manifest.json").write_text("x"), "manifest.json: not JSON"),
    "version": (lambda f: edit_manifest(f, version=3), "version"),
    "hidden dtype": (lambda f: edit_manifest(f, hidden_dtype="float32"), "hidden_dtype"),
    "record size": (lambda f: edit_manifest(f, index_record_size=64), "index_record_size"),
    "layer ids": (lambda f: edit_manifest(f, target_layer_ids=[2, 0]), "target_layer_ids"),
    "layer id base": (lambda f: edit_manifest(f, layer_id_base=2), "layer_id_base: 2; must be 0 or 1"),
    "layer ids in base 1": (lambda f: edit_manifest(f, layer_id_base=1, target_layer_ids=[-1, 2]), "at least 0"),
    "final norm": (lambda f: edit_manifest(f, final_normed=1), "final_normed"),
    "another width": (lambda f: edit_manifest(f, hidden_size=97), "samples.idx: record"),
    "more samples": (lambda f: edit_manifest(f, num_samples=4), "samples.idx"),
    "no index": (lambda f: (f / "samples.idx").unlink(), "samples.idx"),
    "index cut": (lambda f: cut(f / "samples.idx", 167), "samples.idx"),
    "shard cut": (lambda f: cut(f / "shard-00000.bin", 50_000), "record"),
    "shard missing": (lambda f: (f / "shard-00000.bin").unlink(), "shard-00000.bin"),
    "shard outside": (lambda f: edit_manifest(f, shards=[{"shard_id": 0, "file_name": "../x"}]), "file_name"),
    "shard twice": (lambda f: edit_manifest(f, shards=SHARD * 2, num_shards=2), "shard_id"),
    "shard count": (lambda f: edit_manifest(f, num_shards=2), "num_shards"),
    "sample number": (lambda f: edit_record(f, 1, sample_id=5), "record 1: sample_id"),
    "shard number": (lambda f: edit_record(f, 1, shard_id=7), "record 1: shard_id"),
    "offset": (lambda f: edit_record(f, 1, loss_mask=2**63), "record 1: loss_mask"),
    "length": (lambda f: edit_record(f, 1, seq_len=2**31), "record 1"),
    "overlap": (lambda f: edit_record(f, 1, input_ids=0), "overlaps"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_caches_are_one_clear_line(case, tmp_path):
    change, part = BAD[case]
    folder = tmp_path / "cache"
    shutil.copytree(GOLDENS / "dspark/cache_v2", folder)
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        TargetCache(folder)
    assert str(folder) in str(error.value) and part in str(error.value) and "\n" not in str(error.value)


def test_a_cache_fits_the_target_that_made_it(tmp_path):
    """And a wrong base, a wrong word on the norm and another target are found."""
    target, folder = pairs.target("dspark/target"), tmp_path / "cache"
    target_cache.check_fits(TargetCache(GOLDENS / "dspark/cache_v2"), target)
    shutil.copytree(GOLDENS / "dspark/cache_v2", folder)
    for fields, message in (({"layer_id_base": 1, "target_layer_ids": [1, 3]}, None),
                            ({"target_layer_ids": [0, 3]}, "those of layer -1 are nearest to the target's layer 0"),
                            ({"target_layer_ids": [0, 1], "layer_id_base": 0}, "those of layer 1 are nearest to the"),
                            ({"target_layer_ids": [0, 40]}, "target_layer_ids: [0, 40]; the target's layers are 0.."),
                            ({"target_layer_ids": [0, 2], "final_normed": False}, "they are nearer to those after")):
        edit_manifest(folder, **fields)
        if message is None:
            cache = TargetCache(folder)
            assert cache.target_layer_ids == (0, 2) and cache.final_normed
            target_cache.check_fits(cache, target)
        else:
            with pytest.raises(ValueError) as error:
                target_cache.check_fits(TargetCache(folder), target)
            assert str(error.value).startswith(str(folder)) and message in str(error.value)
    with pytest.raises(ValueError, match="hidden_size: 96; the target's is 32"):
        target_cache.check_fits(TargetCache(folder), pairs.random_target())


def test_an_empty_sample_is_allowed(tmp_path):
    folder = tmp_path / "cache"
    shutil.copytree(GOLDENS / "dspark/cache_v2", folder)
    edit_record(folder, 2, seq_len=0)
    cache = target_cache.TargetCache(folder)
    assert cache[2].target_hidden_states.shape == (0, 192) and cache.batch([2])["input_ids"].shape == (1, 0)


# ------------------------------------------------------------------------------------------------------------- writing


ARRAYS = (*TOKENS, *HIDDEN)


def writer_like(cache, folder, **changed):
    options = {"target": "target", "layer_ids": (0, 2), "hidden_size": 96, "fingerprint": "of the goldens"} | changed
    return Writer(folder, cache.lengths, **options)


@pytest.mark.parametrize("shard_bytes", [2**36, 48_000, 1])
def test_what_is_written_is_what_deepspec_wrote(shard_bytes, tmp_path, monkeypatch):
    """The samples of its own cache, put in another order: the same shard and index, in one shard byte for byte."""
    monkeypatch.setattr(target_cache_writer, "SHARD_BYTES", shard_bytes)
    expected, folder = TargetCache(GOLDENS / "dspark/cache_v2"), tmp_path / "cache"
    writer = writer_like(expected, folder)
    for i in (2, 0, 1):
        writer.put(i, *(getattr(expected[i], name) for name in ARRAYS))
    cache = writer.finish()
    for i in range(3):
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(cache[i], name).view(np.uint8), getattr(expected[i], name).view(np.uint8))
    shards = sorted(folder.glob("shard-*.bin"))
    assert len(shards) == {2**36: 1, 48_000: 2, 1: 3}[shard_bytes]
    assert all(s.stat().st_size <= shard_bytes for s in shards) or shard_bytes == 1
    if len(shards) == 1:
        for name in ("shard-00000.bin", "samples.idx"):
            assert (folder / name).read_bytes() == (GOLDENS / "dspark/cache_v2" / name).read_bytes()
        ours = json.loads((folder / "manifest.json").read_text())
        theirs = json.loads((GOLDENS / "dspark/cache_v2/manifest.json").read_text())
        assert {name: ours[name] for name in theirs if name in ours} == {name: theirs[name] for name in theirs if name in ours}
        assert {"version", "num_samples", "shards", "target_layer_ids", "hidden_size"} <= {*ours} & {*theirs}


def test_a_writer_goes_on_where_the_last_one_was(tmp_path):
    expected = TargetCache(GOLDENS / "dspark/cache_v2")
    writer = writer_like(expected, tmp_path)
    assert writer.done == 0
    writer.put(0, *(getattr(expected[0], name) for name in ARRAYS))
    writer.keep(1)
    with pytest.raises(FileNotFoundError, match="manifest.json"):
        TargetCache(tmp_path)
    with pytest.raises(ValueError, match="fingerprint, target_layer_ids differ|target_layer_ids, .*fingerprint differ"):
        writer_like(expected, tmp_path, fingerprint="another", layer_ids=(0, 1))
    later = writer_like(expected, tmp_path)
    assert later.done == 1
    for i in (1, 2):
        later.put(i, *(getattr(expected[i], name) for name in ARRAYS))
    later.keep(3)
    cache = later.finish()
    np.testing.assert_array_equal(cache[0].input_ids, expected[0].input_ids)
    assert writer_like(expected, tmp_path).done == 3
    assert sorted(f.name for f in tmp_path.iterdir()) == ["manifest.json", "samples.idx", "shard-00000.bin"]


def test_samples_of_another_shape_are_refused(tmp_path):
    expected = TargetCache(GOLDENS / "dspark/cache_v2")
    writer, arrays = writer_like(expected, tmp_path), [getattr(expected[1], name) for name in ARRAYS]
    for at, wrong in ((0, arrays[0].astype(np.int64)), (3, arrays[3][:, 1:]), (4, arrays[4][1:])):
        with pytest.raises(ValueError, match=f"sample 1: {ARRAYS[at]}: .*; must be "):
            writer.put(1, *arrays[:at], wrong, *arrays[at + 1:])
