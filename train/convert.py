"""Write a drafter in another layout, or in another form that computes the same.

  python -m train.convert --from=runs/quickstart --to=out --layout=speculators --target=smollm2-135m-instruct
  python -m train.convert --from=DFlash-dir --to=out --layout=z-lab --transition=context     (a DFlash-2 to go on from)
  python -m train.convert --from=DSpark-dir --to=out --layout=native --execution=lattice

Layouts: native (this library's own), deepspec, z-lab, speculators, specforge. A target is needed where the layout
stores its embedding and output table (deepspec, speculators) and the source does not, and for a training run.
"""

from absl import flags

import dspark_jax as ds
from dspark_jax import loading
from dspark_jax.checkpoints import conversions, huggingface
from dspark_jax.drafter import EXECUTIONS
from dspark_jax.transitions import TRANSITIONS
from train import command_line, measure

_FROM = flags.DEFINE_string("from", None, "The drafter: its directory in any layout, or a training run.", required=True)
_TO = flags.DEFINE_string("to", None, "The directory to write.", required=True)
_LAYOUT = flags.DEFINE_enum("layout", None, huggingface.LAYOUTS, "The layout to write.", required=True)
_TARGET = flags.DEFINE_string(
    "target", None, "Its target: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ("bfloat16", "float16", "float32"), "Of the weights; what they have if unset (native: bfloat16)."
)
_TRANSITION = flags.DEFINE_enum("transition", None, tuple(TRANSITIONS), "The transition to convert to.")
_EXECUTION = flags.DEFINE_enum("execution", None, EXECUTIONS, "How the checkpoint asks to be run.")
_CANDIDATES = flags.DEFINE_integer("candidates", None, "Candidates per position of the lattice.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 256, "Rank of a transition that takes the place of none.", lower_bound=1)
_BLOCK_LAYOUT = flags.DEFINE_enum(
    "block_layout", None, ("anchor_first", "fill_in"), "Must be what the drafter has: there is no conversion."
)


def main():
    drafter = _load()
    if _TRANSITION.value == "context" and drafter.config.transition == "none":
        drafter = conversions.to_dflash2(drafter, rank=_RANK.value)
    drafter = conversions.convert(
        drafter, transition=_TRANSITION.value, execution=_EXECUTION.value, candidates=_CANDIDATES.value,
        block_layout=_BLOCK_LAYOUT.value, rank=_RANK.value)
    c, missing = drafter.config, []
    if _LAYOUT.value != "native":
        if c.copy_length:
            drafter = conversions.without_copying(drafter)
            missing.append("the copy term")
        if c.confidence_with_law:
            drafter = conversions.without_confidence(drafter)
            missing.append("the confidence head, which reads the law of the draft")
        elif c.confidence_temperatures:
            missing.append(f"confidence_temperatures {list(c.confidence_temperatures)}")
    ds.save_drafter(drafter, _TO.value, _LAYOUT.value, _DTYPE.value)
    print(f"{_TO.value}: {_LAYOUT.value}, transition {c.transition}, {c.execution}, {c.block_length} drafts a block "
          f"({c.layout})")
    if missing:
        print(f"not in it, for this layout has no place for it: {'; '.join(missing)}")


def _load():
    measure.check_drafter(_FROM.value, "--from")
    if _TARGET.value:
        return ds.load_drafter(_FROM.value, ds.load_target(_TARGET.value))
    if loading.is_run(_FROM.value):
        raise ValueError(f"--target: unset; {_FROM.value} is a training run, which needs its target to be read")
    return huggingface.load(_FROM.value)


if __name__ == "__main__":
    command_line.run(main)
