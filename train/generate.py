"""Answer one prompt with a target and a drafter.

  python -m train.generate --prompt="What is a prime number?"
  python -m train.generate --prompt="def fibonacci(n):" --raw --temperature=0.7 --top_p=0.9
  python -m train.generate --prompt="Tell me a joke." --drafter=      (an empty drafter: plain decoding)
"""

import sys

from absl import flags

import dspark_jax as ds
from dspark_jax.drafter import EXECUTIONS
from dspark_jax.tokenizer import TextStream
from train import command_line, measure

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Who answers: a Hugging Face directory, a .gguf file or smollm2-135m-instruct."
)
_DRAFTER = flags.DEFINE_string(
    "drafter", str(measure.SHIPPED_DRAFTER), "Who drafts: a saved drafter or a training run; empty: nobody."
)
_PROMPT = flags.DEFINE_string("prompt", None, "The user's message.", required=True)
_RAW = flags.DEFINE_bool("raw", False, "Continue the prompt as it stands, without a chat template.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "The answer is cut after this many tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 takes the likeliest token.", lower_bound=0.0)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k likeliest tokens; 0: from all.", lower_bound=0)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample from the likeliest tokens that hold this much probability.")
_SEED = flags.DEFINE_integer("seed", 0, "Changes the samples.")
_EXECUTION = flags.DEFINE_enum("execution", None, EXECUTIONS, "How blocks are drafted; what the drafter declares if unset.")
_CANDIDATES = flags.DEFINE_integer("candidates", None, "Candidates per position of the lattice.")
_CONFIDENCE_THRESHOLD = flags.DEFINE_float(
    "confidence_threshold", 0.0, "Verify only the drafts before the first one less likely to be accepted than this."
)


def main():
    if _DRAFTER.value:
        measure.check_drafter(_DRAFTER.value)
    target = measure.load_target(_TARGET.value)
    drafter = ds.load_drafter(_DRAFTER.value, target) if _DRAFTER.value else None
    tokenizer = target.tokenizer
    prompt = tokenizer.encode(_PROMPT.value) if _RAW.value else tokenizer.chat(
        [{"role": "user", "content": _PROMPT.value}])
    text, parts = TextStream(tokenizer), []
    for part in ds.stream(
            target, drafter, [prompt], max_new_tokens=_MAX_NEW_TOKENS.value, temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value, top_p=_TOP_P.value, seed=_SEED.value, execution=_EXECUTION.value,
            candidates=_CANDIDATES.value, confidence_threshold=_CONFIDENCE_THRESHOLD.value):
        parts.append(part)
        print(text.push(part.tokens[0]), end="", flush=True)
    print(text.finish())
    if drafter:
        result = ds.Result.join(parts)
        print(f"accepted length {result.accepted_length:.2f} over {len(result.accepted[0])} rounds", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main)
