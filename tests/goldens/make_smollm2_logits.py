"""Makes smollm2_logits.npz: what PyTorch computes from the GGUF file of the SmolLM2-135M target.

Was run once, on a CPU, in an environment of its own, which the library never needs (Python 3.11, torch 2.13.0+cpu,
transformers 5.10.2, accelerate 1.15.0, gguf 0.19.0, tokenizers 0.22.2, numpy 2.4.6):

    python3 -m venv /tmp/torch
    /tmp/torch/bin/pip install torch==2.13.0 transformers==5.10.2 accelerate==1.15.0 gguf==0.19.0
    /tmp/torch/bin/python tests/goldens/make_smollm2_logits.py ~/.cache/dspark_jax/SmolLM2-135M-Instruct.Q4_1.gguf

The model is transformers' LlamaForCausalLM in float32. Its weights are read here, not by transformers' own GGUF loader,
and compared with what that loader makes of the file. The tokenizer is built here too: transformers' misses the digit
split.

Arrays, P = all positions of all texts one after the other, `lengths` [texts] says how many each has:
    tokens int32 [P]; argmax int32 [P]; top_ids int32 [P, 8], top_logits float32 [P, 8], best first;
    columns int32 [64], a fixed choice of vocabulary ids, and column_logits float32 [P, 64];
    final_norm float32 [P], the L2 norm of the final-normed hidden state;
    tap_norms float32 [P, 31], of the embedding output and of each decoder layer's raw output.
"""

import pathlib
import sys

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TEXTS = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nA train travels 60 miles in 1.5 hours. What is its speed?<|im_end|>\n<|im_start|>assistant\n"
    "To find the speed, divide the distance by the time: 60 / 1.5 = 40 miles per hour.<|im_end|>",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n"
    "            result.append(right[j])\n            j += 1\n    return result + left[i:] + right[j:]\n",
    "The old lighthouse had stood on the rocks for more than a hundred years, and nobody in the village could remember "
    "a winter when its lamp had not been lit. On the night of the great storm, however, the keeper was nowhere to be "
    "found, and three children climbed the stairs alone.",
    "pi = 3.14159265358979; e = 2.718281828; 1234567890 * 987 = 1218518517630; "
    "on 2024-02-29 at 23:59:59 it was 17.5°C.",
    "Crème brûlée, naïve façade, 東京, привет, Ελλάδα, 🙂🚀 — “quoted”…\n\n\t| a | b |\n\t|---|---|\n\t| 1 | 2 |\n",
]


def control_ids(metadata):
    return [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]


def encode(metadata, text):
    words = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens([words[i] for i in control_ids(metadata)])
    return tokenizer.encode(text, add_special_tokens=False).ids


def build(reader, metadata):
    get = lambda key: metadata[f"llama.{key}"]
    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=get("vocab_size"), hidden_size=get("embedding_length"), intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=get("context_length"), rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")}, tie_word_embeddings=True)
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
        part = tensor.name.split(".")
        if part[0] != "blk":
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]] = weight
            continue
        if part[2] in ("attn_q", "attn_k"):  # rows lie in interleaved rotary order
            n = heads if part[2] == "attn_q" else kv_heads
            weight = weight.reshape(n, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        state[f"model.layers.{part[1]}.{names[part[2]]}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


def compare_with_loader(model, path):
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    print("weights equal those that transformers reads from the file")


def main(path):
    torch.set_num_threads(1)
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    model = build(reader, metadata)
    compare_with_loader(model, path)
    taps = []
    model.model.embed_tokens.register_forward_hook(lambda m, i, out: taps.append(out))
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, i, out: taps.append(out[0] if isinstance(out, tuple) else out))
    frequent = [0, 1, 2, 3, 28, 30, 198, 253]
    rest = np.random.default_rng(0).choice(np.arange(300, model.config.vocab_size), 64 - len(frequent), replace=False)
    columns = np.concatenate([frequent, np.sort(rest)])
    names = ("tokens", "argmax", "top_ids", "top_logits", "column_logits", "final_norm", "tap_norms")
    out = {name: [] for name in names}
    lengths = []
    for text in TEXTS:
        ids = encode(metadata, text)
        taps.clear()
        with torch.no_grad():
            final = model.model(torch.tensor([ids])).last_hidden_state[0]
            logits = model.lm_head(final)
        best, where = torch.topk(logits, 8, dim=-1)
        lengths.append(len(ids))
        out["tokens"].append(ids)
        out["argmax"].append(logits.argmax(-1).numpy())
        out["top_ids"].append(where.numpy())
        out["top_logits"].append(best.numpy())
        out["column_logits"].append(logits[:, columns].numpy())
        out["final_norm"].append(final.norm(dim=-1).numpy())
        out["tap_norms"].append(np.stack([t[0].norm(dim=-1).numpy() for t in taps], axis=-1))
        print(len(ids), "tokens, smallest distance of the best two logits", (best[:, 0] - best[:, 1]).min().item())
    arrays = {name: np.concatenate(parts) for name, parts in out.items()}
    arrays |= {"columns": columns, "lengths": np.array(lengths)}
    arrays = {name: a.astype(np.float32 if a.dtype.kind == "f" else np.int32) for name, a in arrays.items()}
    np.savez_compressed(pathlib.Path(__file__).with_name("smollm2_logits.npz"), **arrays)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
