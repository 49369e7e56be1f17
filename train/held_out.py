"""The accepted length on held-out prompts, by decoding them greedily with the drafter that is being trained."""

from dspark_jax.data import sources
from train import measure


def prompts(options, target):
    """``options.prompts`` token lists of each evaluation set. Raises ValueError where the target cannot read them."""
    if options.prompts and target.tokenizer is None:
        raise ValueError("evaluation.prompts: this target has no tokenizer; only 0 is allowed")
    return [target.tokenizer.chat(prompt.messages) for name in sources.EVALUATION_SOURCES
            for prompt in (sources.evaluation_prompts(name, options.prompts) if options.prompts else ())]


def is_due(options, step, steps):
    """Whether prompts are decoded after ``step`` of ``steps`` steps: before, at the end, and each ``options.every``."""
    every = options.every and step % options.every == 0
    return bool(options.prompts and (every or step in (0, steps)))


def accepted_length(target, drafter, prompts, max_new_tokens, stop):
    """Tokens a round over all prompts; None if `stop`, a `signals.StopRequest`, was given a signal before all were decoded."""
    measured = []
    for prompt in prompts:
        if stop.agreed():
            return None
        measured.append(measure.evaluate(target, drafter, [prompt], max_new_tokens=max_new_tokens, plain=False))
    return measure.merge(measured).accepted_length
