"""Say what a drafter's directory holds, and what is needed to decode with it. Reads no weights.

  python -m train.inspect DIR
"""

import math

import jax

from dspark_jax import loading
from dspark_jax.checkpoints import huggingface, layouts
from dspark_jax.drafter import abstract_params
from train import command_line, measure

_FAMILIES = {"none": "DFlash", "vanilla": "DSpark", "joint": "DSpark", "recurrent": "DSpark", "context": "DFlash-2"}


def main(directory):
    measure.check_drafter(directory, "directory")
    if loading.is_run(directory):
        config, layout, facts, stored = loading.read_run_file(directory)[0], "training run", {}, None
    else:
        checkpoint = huggingface.open_checkpoint(directory)
        config, layout, facts, stored = checkpoint.config, checkpoint.layout, checkpoint.target, checkpoint.tensors
    print("\n".join(f"{name + ':':<12} {text}" for name, text in describe(config, layout, facts, stored)))


def describe(config, layout, facts, stored) -> list[tuple[str, str]]:
    """Lines (name, text) for a `DrafterConfig`.

    layout: name of the layout; facts: `Drafter.target`; stored: the tensors by name, None where they were not read.
    """
    b = config.backbone
    owner = layouts.LAYOUTS[layout].owner if layout in layouts.LAYOUTS else "this library"
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    tables = [name for name in ("embed_tokens.weight", "lm_head.weight") if stored and name in stored]
    kinds = [b.attention_of(i) for i in range(b.num_hidden_layers)]
    attention = "full" if not b.attention else ", ".join(
        (f"window {k.window}" if k.window else "full") + (" causal" if k.causal else "") for k in kinds)
    vocabulary = f"{config.vocab_size} tokens" + (
        f", {config.draft_vocab_size} of them can be drafted" if config.draft_vocab_size < config.vocab_size else "")
    depth = facts.get("num_target_layers")
    needs = (f"a target with hidden size {b.hidden_size}, {config.vocab_size} tokens and "
             + (f"{depth} layers" if depth else f"at least {config.target_layer_ids[-1] + (2 if layout in layouts.LAYOUTS else 1)} layers")
             + ("" if "embed_tokens.weight" in tables else "; its embedding and output table are used"))
    candidates = f", {config.candidates} candidates" if config.execution == "lattice" else ""
    convolution = f", convolution of {b.conv_kernel_size} taps" if b.conv_kernel_size else ""
    lines = [
        ("family", _FAMILIES[config.transition]),
        ("layout", f"{layout} ({owner})"),
        ("transition", config.transition + (f", rank {config.rank}" if config.transition != "none" else "")),
        ("execution", config.execution + candidates),
        ("confidence", "yes" if config.confidence else "no"),
        ("copy term", f"agreement of up to {config.copy_length} tokens" if config.copy_length else "no"),
        ("block", f"{config.block_length} drafts from {config.slots} slots, {config.layout}"),
        ("layers", f"{b.num_hidden_layers} of width {b.hidden_size}, attention {attention}{convolution}"),
        ("taps", f"{', '.join(map(str, config.target_layer_ids))} (0 is the output of the target's first layer)"),
        ("vocabulary", vocabulary),
        ("parameters", f"{weights:,}" + (f", and stored beside them: {', '.join(tables)}" if tables else "")),
    ]
    if stored:
        lines.append(("dtype", ", ".join(sorted({t.dtype for t in stored.values()}))))
    return [*lines, ("needs", needs)]


if __name__ == "__main__":
    command_line.run(main)
