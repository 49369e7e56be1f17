"""speculators' features, one safetensors file a document: read back, and refused where they are not what is said."""

import ml_dtypes
import numpy as np
import pytest

import pairs
from dspark_jax import target as target_lib
from dspark_jax.checkpoints.safetensors_files import write_file
from dspark_jax.data.documents import Documents
from dspark_jax.data.speculators_cache import SpeculatorsCache
from dspark_jax.data.target_cache import check_fits

LENGTHS = (12, 3, 30)


@pytest.fixture(scope="module")
def target():
    return pairs.random_target(layers=3)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return Documents.pack([(rng.integers(0, 48, n), np.arange(n) > 1, "") for n in LENGTHS])


@pytest.fixture(scope="module")
def tensors(target, documents):
    """{file name: its tensors}, of the outputs of the first decoder layer and of the last, before the final norm."""
    files = {}
    for i in range(len(documents)):
        tokens = documents.document(i)[0].astype(np.int64)
        padded = np.pad(tokens, (0, 30 - len(tokens)))[None]
        _, tapped = target_lib.forward(target.config, target.params, padded, (0, 2))
        states = np.stack([state[0, :len(tokens)] for state in tapped], axis=1).astype(ml_dtypes.bfloat16)
        files[f"hs_{i}.safetensors"] = {"token_ids": tokens, "hidden_states": states}
    return files


def write(folder, files):
    for name, tensors in files.items():
        write_file(folder / name, tensors)
    (folder / "hs_0.safetensors.lock").touch()  # what its writers leave
    return folder


def open_cache(folder, documents, layer_ids=(1,), layer_id_base=1, final_normed=False):
    return SpeculatorsCache(folder, documents, layer_ids, layer_id_base=layer_id_base, final_normed=final_normed)


def test_reads_back_exactly(target, documents, tensors, tmp_path):
    cache = open_cache(write(tmp_path, tensors), documents)
    assert len(cache) == 3 and cache.lengths.tolist() == list(LENGTHS) and cache.hidden_size == 32
    assert cache.target_layer_ids == (0,) and not cache.final_normed
    for i in range(3):
        sample, states = cache[i], tensors[f"hs_{i}.safetensors"]["hidden_states"]
        assert sample.target_hidden_states.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(sample.target_hidden_states, states[:, 0])
        np.testing.assert_array_equal(sample.target_last_hidden_states, states[:, 1])
        np.testing.assert_array_equal((sample.input_ids, sample.loss_mask), documents.document(i))
        assert sample.attention_mask.all()
    np.testing.assert_array_equal(cache[-1].input_ids, cache[2].input_ids)
    with pytest.raises(IndexError):
        cache[3]
    check_fits(cache, target)
    for wrong, message in (({"layer_id_base": 0}, "those of layer 1 are nearest to the target's layer 0"),
                           ({"layer_ids": (0,)}, "those of layer -1 are nearest to the target's layer 0"),
                           ({"final_normed": True}, "nearer to those before the target's final norm")):
        with pytest.raises(ValueError, match=message):
            check_fits(open_cache(tmp_path, documents, **wrong), target)


def test_what_is_wrong_is_named(documents, tensors, tmp_path):
    one = tensors["hs_1.safetensors"]
    write(tmp_path, tensors)
    file = tmp_path / "hs_1.safetensors"
    for changed, message in (
        ({"token_ids": one["token_ids"]}, "tensor 'hidden_states': is missing"),
        (one | {"token_ids": one["token_ids"].astype(np.float32)}, "tensor 'token_ids': dtype F32; must be I64 or I32"),
        (one | {"hidden_states": one["hidden_states"].view(np.int16)}, "tensor 'hidden_states': dtype I16"),
        (one | {"hidden_states": one["hidden_states"][:2]}, r"shape \[2, 2, 32\]; must be \[3, 2, 32\], for a doc"),
        (one | {"hidden_states": one["hidden_states"][..., :16]}, r"shape \[3, 2, 16\]; must be \[3, 2, 32\]"),
        (one | {"hidden_states": one["hidden_states"][0]}, r"shape \[2, 32\]; must be \[3, 2, None\]"),
    ):
        write_file(file, changed)
        with pytest.raises(ValueError, match=f"^{file}: .*{message}"):
            open_cache(tmp_path, documents)
    write_file(file, one | {"token_ids": one["token_ids"] + 1})
    with pytest.raises(ValueError, match=rf"^{file}: token_ids\[0\]: \d+; document 1 has"):
        open_cache(tmp_path, documents)[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"^{file}: "):
        open_cache(tmp_path, documents)
    file.unlink()
    with pytest.raises(ValueError, match=f"^{file}: no such file; there are 3 documents, from 0"):
        open_cache(tmp_path, documents)
    write_file(file, one)
    with pytest.raises(ValueError, match="hs_2.safetensors: one file too many; there are 2 documents"):
        open_cache(tmp_path, documents.first(2))
    for fields, message in (({"layer_id_base": 3}, "layer_id_base: 3; must be 0 or 1"),
                            ({"layer_ids": ()}, "must be strictly increasing, not empty"),
                            ({"layer_ids": (-1,)}, "at least 0, the embedding output")):
        with pytest.raises(ValueError, match=f"^{tmp_path}: .*{message}"):
            open_cache(tmp_path, documents, **fields)
