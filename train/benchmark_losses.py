"""The memory that the loss of a training batch takes with its gradient, by the number of anchors computed at a time.

  python -m train.benchmark_losses                    (512 anchors of 7 drafts, 151,936 tokens, width 2560: Qwen3-4B)
  python -m train.benchmark_losses --anchors=64 --vocabulary=49152 --width=576 --rank=64 --sizes=8,64

From hidden states, the output table and the transition to the loss and its gradient by all three but the table: the
program is compiled for these shapes and not run. "extra" is what it allocates besides its arguments and results.
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags

from dspark_jax import chunks
from dspark_jax.backbone import BackboneConfig
from dspark_jax.drafter import DrafterConfig, abstract_params
from dspark_jax.loss_weights import LossWeights, loss_denominators
from train import command_line, measure, objective

_ANCHORS = flags.DEFINE_integer("anchors", 512, "Anchors per sequence.", lower_bound=1)
_BLOCK = flags.DEFINE_integer("block_length", 7, "Drafts of a block.", lower_bound=1)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 151936, "Tokens.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 2560, "Width of hidden states.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 256, "Rank of the transition.", lower_bound=1)
_SIZES = flags.DEFINE_list("sizes", [], "Anchors at a time, one line each; empty: what training chooses, and all.")

_LIMIT = 1 << 30  # bytes, of what training chooses


def main():
    shape = dict(anchors=_ANCHORS.value, T=_BLOCK.value, V=_VOCABULARY.value, D=_WIDTH.value, R=_RANK.value)
    chosen = chunks.anchors_per_chunk(1, shape["anchors"], shape["T"], shape["V"])
    try:
        sizes = [int(size) for size in _SIZES.value] or [chosen, shape["anchors"]]
    except ValueError:
        raise ValueError(f"--sizes={','.join(_SIZES.value)}: must be whole numbers") from None
    if min(sizes) < 1:
        raise ValueError(f"--sizes={','.join(_SIZES.value)}: must be at least 1")
    one = shape["anchors"] * shape["T"] * shape["V"] * 4
    print(f"one array of logits of all drafts: {one / 2**30:.2f} GiB")
    compiled = {size: compile_loss(LossWeights(), size=size, **shape) for size in sizes}
    extra = {size: program.memory_analysis().temp_size_in_bytes for size, program in compiled.items()}
    print(measure.table(["anchors at a time", "extra MiB"], [[str(s), f"{b / 2**20:.0f}"] for s, b in extra.items()]))
    if extra.get(chosen, 0) > _LIMIT:
        raise ValueError(f"extra {extra[chosen] / 2**20:.0f} MiB: more than {_LIMIT / 2**20:.0f} MiB")


def compile_loss(weights, *, anchors, T, V, D, R, size, reduced=None):
    """The compiled gradient of `objective.chunk_loss` over one sequence, ``size`` anchors at a time.

    ``reduced``: number of tokens that can be drafted, if not all V.
    """
    backbone = BackboneConfig(hidden_size=D, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1,
                              num_key_value_heads=1, head_dim=2)
    config = DrafterConfig(backbone=backbone, vocab_size=V, draft_vocab_size=reduced or V, block_length=T,
                           layout="anchor_first", target_layer_ids=(0,), mask_token_id=0, rank=R)
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    shared = {"successor": abstract_params(config)["transition"]["successor"]}
    rows = {"hidden": of(1, anchors, T, D), "phi": of(1, anchors, T, R), "confidence": of(1, anchors, T)}
    fixed = {"head_rows": of(reduced or V, D), "target_head": of(V, D) if reduced else None}
    fixed_rows = {"final": of(1, anchors, T, D),
                  **{name: of(1, anchors, T, dtype=jnp.int32) for name in ("labels", "predecessors")},
                  **{name: of(1, anchors, T, dtype=jnp.bool_) for name in ("mask", "reached")}}

    def loss(shared, rows, fixed, fixed_rows):
        denominators = loss_denominators(weights, fixed_rows["mask"], fixed_rows["reached"])
        fixed |= {"weights": weights.at(0), "denominators": denominators}
        f = functools.partial(objective.chunk_loss, config, weights)
        return chunks.sum_in_chunks(f, size, shared, rows, fixed, fixed_rows)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return gradient.lower(shared, rows, fixed, fixed_rows).compile()


if __name__ == "__main__":
    command_line.run(main)
