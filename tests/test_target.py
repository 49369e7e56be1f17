"""The target: against reference numbers, with a cache against without, and what it says about bad input."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
import pairs
from dspark_jax import cache as kv
from dspark_jax import target as target_lib
from dspark_jax.checkpoints import gguf
from golden import load

close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def llama():
    return pairs.target("dflash/target_model")


@pytest.fixture(scope="module")
def qwen():
    return pairs.target("dspark/target")


# ------------------------------------------------------------------------------------------------- reference numbers


def test_llama_golden(llama):
    z = load("dflash/target/forward")
    tokens = z["input_ids"][None]
    states = llama.hidden_states(tokens)
    assert len(states) == len(z["hidden_states"])
    for ours, expected in zip(states, z["hidden_states"]):  # raw states grow with depth, up to 120
        close(ours[0], expected, atol=1e-4 * max(1, np.abs(expected).max() / 30))
    hidden, _ = target_lib.forward(llama.config, llama.params, jnp.asarray(tokens))
    close(hidden[0], z["final_normed"])
    close(llama.logits(tokens)[0], z["logits"])


@pytest.mark.parametrize("prompt", [0, 4])
def test_qwen3_golden(qwen, prompt):
    """Query and key norms, an output head of its own, taps of two layers side by side."""
    z = load("dspark/expected_vanilla")
    tokens = np.array(pairs.expected("dspark/expected_vanilla")["prompts"][prompt]["prompt_ids"])[None]
    hidden, tapped = target_lib.forward(qwen.config, qwen.params, jnp.asarray(tokens), (0, 2))
    close(jnp.concatenate(tapped, axis=-1)[0], z[f"p{prompt}.prefill_context"])
    close(hidden[0], z[f"p{prompt}.prefill_last_hidden"])
    close(qwen.logits(tokens)[0], z[f"p{prompt}.prefill_logits"])


def test_greedy_golden(qwen):
    """Plain decoding says what the reference's plain decoding said, for prompts of different lengths in one batch."""
    prompts = pairs.expected("dspark/expected_vanilla")["prompts"]
    result = ds.generate(qwen, None, [p["prompt_ids"] for p in prompts], max_new_tokens=96)
    for tokens, p in zip(result.tokens, prompts):
        assert p["prompt_ids"] + tokens == p["target_greedy_ids"]


@pytest.mark.target
def test_smollm2_against_pytorch(smollm2):
    """goldens/make_smollm2_logits.py says how the numbers were made."""
    z = load("smollm2_logits")
    config, params = smollm2.config, smollm2.params
    taps = (target_lib.EMBEDDING, *range(config.num_hidden_layers))
    ends = np.cumsum(z["lengths"])
    width = int(z["lengths"].max())  # padded on the right to one compiled shape: nothing looks ahead
    for start, end in zip(ends - z["lengths"], ends):
        tokens = jnp.asarray(np.pad(z["tokens"][start:end], (0, width - (end - start)))[None])
        hidden, tapped = target_lib.forward(config, params, tokens, taps)
        logits = np.asarray(target_lib.head(config, params, hidden))[0, :end - start]
        assert logits.shape[-1] == config.vocab_size
        np.testing.assert_array_equal(logits.argmax(-1), z["argmax"][start:end])
        tops = np.take_along_axis(logits, z["top_ids"][start:end], axis=-1)
        np.testing.assert_allclose(tops, z["top_logits"][start:end], rtol=0, atol=2e-3)
        np.testing.assert_allclose(logits[:, z["columns"]], z["column_logits"][start:end], rtol=0, atol=2e-3)
        norms = np.linalg.norm(np.stack([t[0, :end - start] for t in tapped], axis=1), axis=-1)
        np.testing.assert_allclose(norms, z["tap_norms"][start:end], rtol=1e-4)
        final = np.linalg.norm(hidden[0, :end - start], axis=-1)
        np.testing.assert_allclose(final, z["final_norm"][start:end], rtol=1e-4)


@pytest.mark.target
def test_smollm2_facts(smollm2):
    c = smollm2.config
    assert (c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.num_key_value_heads) == (30, 576, 9, 3)
    assert (c.head_dim, c.intermediate_size, c.vocab_size, c.tie_word_embeddings) == (64, 1536, 49152, True)
    assert (c.rope_theta, c.max_position_embeddings, set(c.stop_tokens)) == (1e5, 8192, {0, 2})
    assert c.rms_norm_eps == pytest.approx(1e-5)
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.params)) == 134_515_008


# --------------------------------------------------------------------------------------------- with and without cache


@functools.partial(jax.jit, static_argnums=(0,))
def cached(config, params, tokens, starts, cache):
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    hidden, tapped, cache = target_lib.Decoder(config).apply({"params": params}, tokens, positions, cache, (-1, 0, 1))
    return hidden, tapped, cache


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("lengths, pieces", [((20,), (9, 1, 1, 9)), ((20, 7, 14), (9, 1, 9, 1))])
def test_cached_equals_one_shot(kind, lengths, pieces):
    """Pieces of any size; rows that end early carry garbage in the cache, which later rows never see.

    A row that has no more tokens of its own in a piece stays where it is and processes garbage there: exactly what a
    decoding round leaves behind where drafts were rejected.
    """
    qwen3 = {"qk_norm": True, "tie_word_embeddings": False, "attention_bias": True}
    target = pairs.random_target(**(qwen3 if kind == "qwen3" else {}))
    config, rng = target.config, np.random.default_rng(1)
    rows = [rng.integers(0, config.vocab_size, n) for n in lengths]
    cache = jax.tree.map(
        lambda a: a + 1e3,  # not zeros: what was never written must not be seen either
        kv.empty_cache(config.num_hidden_layers, len(rows), 40, config.num_key_value_heads, config.head_dim))
    starts = np.zeros(len(rows), np.int32)
    got = [[] for _ in rows]
    for piece in pieces:
        tokens = rng.integers(0, config.vocab_size, (len(rows), piece)).astype(np.int32)
        taken = [min(piece, len(row) - start) for row, start in zip(rows, starts)]
        for tokens_row, row, start, n in zip(tokens, rows, starts, taken):
            tokens_row[:n] = row[start:start + n]
        hidden, tapped, cache = cached(config, target.params, jnp.asarray(tokens), jnp.asarray(starts), cache)
        for out, n, *arrays in zip(got, taken, hidden, *tapped):
            out.append([np.asarray(a)[:n] for a in arrays])
        starts += np.array(taken, np.int32)
    for row, out in zip(rows, got):
        alone, tapped = target_lib.forward(config, target.params, jnp.asarray(row[None], jnp.int32), (-1, 0, 1))
        for parts, expected in zip(zip(*out), (alone, *tapped)):
            close(np.concatenate(parts), expected[0], atol=2e-5)


def test_right_padding_is_never_seen(llama):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (3, 20))
    other = tokens.copy()
    other[:, 12:] = rng.integers(0, 256, (3, 8))
    np.testing.assert_array_equal(llama.logits(tokens)[:, :12], llama.logits(other)[:, :12])


def test_hidden_states_are_raw_layer_outputs(llama):
    """The list is the embedding output and then each layer's output; the last is not normed: `forward` norms it."""
    c, tokens = llama.config, np.arange(10, 30)[None]
    states = llama.hidden_states(tokens)
    assert len(states) == c.num_hidden_layers + 1
    assert all(s.shape == (1, 20, c.hidden_size) for s in states)
    np.testing.assert_array_equal(states[0], llama.embedding()[tokens])
    hidden, taps = target_lib.forward(c, llama.params, jnp.asarray(tokens), (3, -1, 1))  # in the order asked for
    for tap, i in zip(taps, (3, -1, 1)):
        close(tap, states[i + 1], atol=1e-6)
    weight = np.asarray(llama.params["norm"]["weight"])
    last = np.asarray(states[-1], np.float64)
    close(hidden, last / np.sqrt(np.mean(last**2, -1, keepdims=True) + c.rms_norm_eps) * weight, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_logits_are_hidden_times_head_rows(kind, request):
    target = request.getfixturevalue(kind)
    tokens = np.arange(5, 15)[None]
    hidden, _ = target_lib.forward(target.config, target.params, jnp.asarray(tokens))
    rows = target.head_rows()
    assert rows.shape == target.embedding().shape == (target.config.vocab_size, target.config.hidden_size)
    close(target.logits(tokens), hidden @ rows.T)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("tokens, message", [
    ([[1, 260]], r"token ids must lie in \[0, 260\), got 1..260"),
    ([[-1, 5]], r"token ids must lie in \[0, 260\), got -1..5"),
    ([[]], r"must have shape \[batch, length\] and not be empty, got shape \(1, 0\)"),
    ([1, 2], r"must have shape \[batch, length\] and not be empty, got shape \(2,\)"),
    ([[1.5, 2.0]], r"tokens must be whole numbers, got float64"),
    (np.zeros((1, 1025), int), r"1025 tokens exceed the target's context of 1024"),
])
def test_bad_tokens(llama, tokens, message):
    for call in (llama.logits, llama.hidden_states):
        with pytest.raises(ValueError, match=message):
            call(tokens)


@pytest.mark.parametrize("heads, width, columns", [(1, 2, 3), (3, 8, 5), (2, 6, 1)])
def test_half_split_rows(heads, width, columns):
    """Row 2i of a head goes to place i, row 2i+1 to place i + width/2."""
    weight = np.random.default_rng(0).normal(size=(heads * width, columns))
    expected = np.zeros_like(weight)
    for h in range(heads):
        for i in range(width // 2):
            expected[h * width + i] = weight[h * width + 2 * i]
            expected[h * width + width // 2 + i] = weight[h * width + 2 * i + 1]
    np.testing.assert_array_equal(gguf.half_split_rows(weight, width), expected)


def tiny_gguf(path, change=None):
    """A whole Llama target as a GGUF file, in interleaved rotary order as such files are -> the target it came from.

    ``change(name, array)`` -> the array to write, or None to leave the tensor out.
    """
    import gguf as library

    target = pairs.random_target(vocab_size=32, hidden_size=16, max_position_embeddings=64)
    c, change = target.config, change or (lambda name, array: array)
    writer = library.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_vocab_size(c.vocab_size)
    writer.add_eos_token_id(2)
    tensors = {"token_embd.weight": target.embedding(), "output_norm.weight": target.params["norm"]["weight"]}
    for i in range(c.num_hidden_layers):
        layer = target.params[f"layers_{i}"]
        norms = {"attn_norm": layer["input_layernorm"], "ffn_norm": layer["post_attention_layernorm"]}
        attention = {f"attn_{ours}": layer["self_attn"][f"{ours[0]}_proj"] for ours in ("q", "k", "v", "output")}
        mlp = {f"ffn_{part}": layer["mlp"][f"{part}_proj"] for part in ("gate", "up", "down")}
        for name, node in (norms | attention | mlp).items():
            array = node["weight"]
            if name in ("attn_q", "attn_k"):  # back to interleaved order
                array = array.reshape(-1, 2, c.head_dim // 2, c.hidden_size).swapaxes(1, 2).reshape(array.shape)
            tensors[f"blk.{i}.{name}.weight"] = array
    for name, array in tensors.items():
        array = change(name, np.asarray(array, np.float32))
        if array is not None:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_gguf_round_trip(tmp_path):
    target = tiny_gguf(tmp_path / "t.gguf")
    config, params, metadata = gguf.read_target(tmp_path / "t.gguf")
    assert metadata["general.architecture"] == "llama"
    same = lambda c: {f: v for f, v in vars(c).items() if f not in ("stop_tokens", "rms_norm_eps")}
    assert same(config) == same(target.config)  # stop tokens come with the tokenizer
    assert config.rms_norm_eps == pytest.approx(target.config.rms_norm_eps)
    jax.tree.map(np.testing.assert_array_equal, params, target.params)


@pytest.mark.parametrize("change, message", [
    (lambda name, a: None if name == "blk.1.ffn_up.weight" else a, "tensor 'blk.1.ffn_up.weight' is missing"),
    (lambda name, a: a[:, :-1] if name == "blk.0.attn_q.weight" else a,
     "tensor 'blk.0.attn_q.weight' has shape (16, 15), expected (16, 16)"),
    (lambda name, a: a[:-1] if name == "token_embd.weight" else a,
     "tensor 'token_embd.weight' has shape (31, 16), expected (32, 16)"),
])
def test_gguf_wrong_tensor(tmp_path, change, message):
    path = tmp_path / "wrong.gguf"
    tiny_gguf(path, change)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        ds.load_target(path)


def one_line(error, path):
    text = str(error.value)
    assert str(path) in text and "\n" not in text, text
    return text


@pytest.mark.parametrize("keep", [4, 10, 60, 400, 3000, -1000, -1])
def test_truncated_gguf(tmp_path, keep):
    path = tmp_path / "short.gguf"
    tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError) as error:
        ds.load_target(path)
    assert "damaged GGUF file" in one_line(error, path)


@pytest.mark.parametrize("position", [4, 8, 16, 24, 28, 40])
def test_corrupt_gguf_header(tmp_path, position):
    path = tmp_path / "corrupt.gguf"
    tiny_gguf(path)
    data = bytearray(path.read_bytes())
    data[position:position + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        ds.load_target(path)
    one_line(error, path)


def test_no_gguf(tmp_path):
    path = tmp_path / "absent.gguf"
    with pytest.raises(FileNotFoundError) as error:
        ds.load_target(path)
    one_line(error, path)
    path.write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(ValueError) as error:
        ds.load_target(path)
    assert "not a GGUF file" in one_line(error, path)
    path.write_bytes(b"")
    with pytest.raises(ValueError) as error:
        ds.load_target(path)
    assert "not a GGUF file" in one_line(error, path)
    with pytest.raises(ValueError, match="'smollm3': no such file or directory; expected .*'smollm2-135m-instruct'"):
        ds.load_target("smollm3")
