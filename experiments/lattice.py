"""Draws one lattice of real decoding: candidates, the laws between them, the walk, and what the target says.

  python -m experiments.lattice --accepted=2 --prompt=7 --out=experiments/lattice.png

Drawn is the first block of the answer that has --accepted drafts accepted, or the one behind token --anchor of it.
"""

import json
import pathlib

import numpy as np
from absl import flags

import dspark_jax as ds
from dspark_jax.data import sources
from experiments import block_lattices
from train import command_line, measure, plots

_DRAFTER = flags.DEFINE_string("drafter", str(measure.SHIPPED_DRAFTER), "Whose lattice.")
_SET = flags.DEFINE_enum("set", "gsm8k", sources.EVALUATION_SOURCES, "Which prompts.")
_PROMPT = flags.DEFINE_integer("prompt", 0, "Which of them.", lower_bound=0, upper_bound=59)
_ANCHOR = flags.DEFINE_integer("anchor", None, "Which token of the answer the block stands behind.", lower_bound=0)
_ACCEPTED = flags.DEFINE_integer("accepted", 3, "Drafts accepted in the block to look for.", lower_bound=0)
_CANDIDATES = flags.DEFINE_integer("candidates", 16, "Candidates of each position.", lower_bound=2)
_SHOWN = flags.DEFINE_integer("shown", 8, "How many of them are drawn.", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "The picture; beside it a .json with what it shows.", required=True)


def main():
    plots.check()
    measure.check_drafter(_DRAFTER.value)
    target = measure.load_target("smollm2-135m-instruct")
    drafter = measure.load_drafter(_DRAFTER.value, target)
    conversation = sources.evaluation_prompts(_SET.value, 60)[_PROMPT.value]
    prompt = target.tokenizer.chat(conversation.messages)
    answer = np.array(ds.generate(target, None, [prompt], max_new_tokens=96).tokens[0])
    lattices = block_lattices.Lattices(target, drafter, prompt, answer, _CANDIDATES.value)
    T = drafter.config.block_length
    known = range(len(answer) - T)
    if _ANCHOR.value is None:
        at = next((i for i in known if lattices.accepted(i) == _ACCEPTED.value), None)
        if at is None:
            raise ValueError(f"--accepted={_ACCEPTED.value}: no block of this answer; allowed: "
                             f"{sorted({lattices.accepted(i) for i in known})}")
    elif _ANCHOR.value not in known:
        raise ValueError(f"--anchor={_ANCHOR.value}: allowed: 0 to {len(answer) - T - 1}, as the answer has {len(answer)} tokens")
    else:
        at = _ANCHOR.value
    shown = lattices.picture(at, _SHOWN.value) | {"title": f"{conversation.id}, behind token {at} of the answer"}
    plots.lattice_diagram(_OUT.value, **shown)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in shown.items()}
    pathlib.Path(_OUT.value).with_suffix(".json").write_text(json.dumps(plain) + "\n")
    print(f"{_OUT.value}: {shown['title']}: {shown['accepted']} of {T} drafts accepted")


if __name__ == "__main__":
    command_line.run(main)
