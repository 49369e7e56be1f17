"""The training step of `train.benchmark_train` in plain PyTorch, for comparison.

  python -m train.benchmark_torch STEP.npz

Reads parameters, batch and settings from the file and prints one line when ready. Then, for each line on stdin, it
takes one step and prints the loss before it. Needs torch and numpy only.

What a PyTorch programmer would write: eager, float32 or autocast to bfloat16, `F.linear` and `scaled_dot_product_attention` (blocks beside one
copy of their context, with a mask), gradients by autograd, the fused AdamW.

B sequences, S positions, N blocks per sequence, J slots of a block, T drafts of it, D model width, H query heads, K
key/value heads, C head width, V vocabulary.
"""

import json
import sys

import numpy as np
import torch
from torch.nn import functional as F


def rms_norm(x, weight, epsilon):
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rotate(x, positions, theta):
    """Rotary embedding of x [B, H, L, C] at positions int [B, L], channel i turning with i + C/2."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(p, settings, context, x, positions, context_positions, visible):
    """Slots x [B, N*J, D] over context [B, S, D] and each other, where visible [B, N*J, S + N*J] says so."""
    split = lambda y: y.unflatten(-1, (-1, settings["head_dim"])).transpose(1, 2)
    heads = lambda y, name: split(F.linear(y, p[f"{name}_proj/weight"]))
    turned = lambda y, at, name: rotate(
        rms_norm(y, p[f"{name}_norm/weight"], settings["epsilon"]), at, settings["rope_theta"])
    both, at = torch.cat([context, x], dim=1), torch.cat([context_positions, positions], dim=1)
    query, key = turned(heads(x, "q"), positions, "q"), turned(heads(both, "k"), at, "k")
    mixed = F.scaled_dot_product_attention(
        query, key, heads(both, "v"), attn_mask=visible[:, None], enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), p["o_proj/weight"])


def hidden_states(params, settings, batch):
    """[B, N, T, D] after the final norm."""
    epsilon = settings["epsilon"]
    inside = lambda prefix: {name[len(prefix):]: p for name, p in params.items() if name.startswith(prefix)}
    context = F.linear(batch["features"], params["backbone/fc/weight"])
    context = rms_norm(context, params["backbone/hidden_norm/weight"], epsilon)
    positions, x = batch["positions"].flatten(1), F.embedding(batch["ids"].flatten(1), batch["embedding"])
    for i in range(settings["layers"]):
        layer = inside(f"backbone/layers_{i}/")
        y = rms_norm(x, layer["input_layernorm/weight"], epsilon)
        x = x + attention(inside(f"backbone/layers_{i}/self_attn/"), settings, context, y, positions,
                          batch["context_positions"], batch["visible"])
        y = rms_norm(x, layer["post_attention_layernorm/weight"], epsilon)
        gate, up = (F.linear(y, layer[f"mlp/{name}_proj/weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, layer["mlp/down_proj/weight"])
    x = rms_norm(x, params["backbone/norm/weight"], epsilon)
    return x.unflatten(1, batch["ids"].shape[1:])[:, :, -settings["drafts"]:]


def loss(params, settings, batch):
    """ce * CE + l1 * L1 + confidence * BCE of the confidence against the acceptance rate, weighted by position."""
    hidden = hidden_states(params, settings, batch)
    before = F.embedding(batch["predecessors"], params["transition/predecessor"])
    logits = F.linear(hidden, batch["head_rows"]) + F.linear(before, params["transition/successor"])
    confidence = torch.cat([hidden, before], dim=-1) @ params["confidence/kernel"] + params["confidence/bias"]
    with torch.no_grad():
        q = torch.softmax(F.linear(batch["final"], batch["head_rows"]), dim=-1)
    ce = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="none").view_as(batch["labels"])
    l1 = (torch.softmax(logits, dim=-1) - q).abs().sum(-1)
    accept = (1 - l1 / 2).clamp(0, 1).detach()
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    weights = batch["mask"] * torch.exp(-torch.arange(settings["drafts"]) / settings["decay"])
    total = settings["ce"] * ce + settings["l1"] * l1 + settings["confidence"] * bce
    return (weights * total).sum() / (weights.sum() + 1e-6)


def main(file):
    with np.load(file) as arrays:
        settings = json.loads(str(arrays["settings"]))
        array = lambda name: torch.from_numpy(arrays[name])
        params = {name.removeprefix("params/"): array(name) for name in arrays if name.startswith("params/")}
        batch = {name.removeprefix("batch/"): array(name) for name in arrays if name.startswith("batch/")}
    for p in params.values():
        p.requires_grad_()
    batch = {name: x.long() if x.dtype == torch.int32 else x for name, x in batch.items()}
    for name in ("embedding", "head_rows"):  # what is not trained is cast once
        batch[name] = batch[name].to(getattr(torch, settings["dtype"]))
    optimizer = torch.optim.AdamW(params.values(), lr=settings["lr"], betas=(settings["b1"], settings["b2"]),
                                  weight_decay=settings["weight_decay"], fused=True)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    for _ in sys.stdin:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings["dtype"] == "bfloat16"):
            value = loss(params, settings, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), settings["clip"])
        optimizer.step()
        print(value.item(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
