"""What the target says to the evaluation prompts, with its features of it: the texts that drafters are measured on."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

import dspark_jax as ds
from dspark_jax import target as target_lib
from dspark_jax.data.documents import Documents
from train import features, measure

@dataclasses.dataclass(frozen=True)
class Text:
    """tokens int32 [S] and rows bfloat16 [S, taps * D], both padded; ``prompt``: tokens before the ``answer``, int [..];
    log_p float32 [..]: of each token of the answer, at temperature 1; None where it was not sampled."""

    tokens: jax.Array
    rows: jax.Array
    prompt: int
    answer: np.ndarray
    log_p: np.ndarray | None

    @property
    def anchors(self):
        return np.arange(len(self.answer) - 1)


class Texts:
    """The answers to ``prompts``, {name of the set: token lists}, kept in ``folder``; what is there is used again.

    Raises ValueError where the answers there are to other prompts.
    """

    def __init__(self, target, prompts, folder, taps, *, temperature, max_new_tokens, batch_size):
        folder, self._texts = pathlib.Path(folder), {}
        folder.mkdir(parents=True, exist_ok=True)
        for name, tokens in prompts.items():
            file = folder / f"{name}.npz"
            if not file.exists():
                answers = decode(target, None, tokens, name, batch_size, max_new_tokens=max_new_tokens,
                                 temperature=temperature).tokens
                Documents.pack([([*p, *a], [False] * len(p) + [True] * len(a), name) for p, a in zip(tokens, answers)]).save(file)
            said = Documents.load(file)
            found = [said.document(i)[0][:len(prompt)].tolist() for i, prompt in enumerate(tokens[:len(said)])]
            if len(said) != len(tokens) or found != [list(prompt) for prompt in tokens]:
                raise ValueError(f"{file}: answers to other prompts; delete it, or give the same --count")
            sequences = [said.document(i)[0] for i in range(len(said))]
            with tqdm.tqdm(total=len(said), desc=f"features of {name}", leave=False, dynamic_ncols=True) as bar:
                stored = features.compute(target, said, taps, folder / name, batch=4,
                                          progress=lambda done, total: bar.update(done - bar.n))
            laws, log_p = folder / f"{name}_log_p.npy", None
            if temperature and not laws.exists():
                np.save(laws, np.concatenate([log_p_of(target, s) for s in tqdm.tqdm(
                    sequences, desc=f"laws of {name}", leave=False, dynamic_ncols=True)]))
            if temperature:
                log_p = np.load(laws, allow_pickle=False)
            self._texts[name] = said, stored, log_p, len(taps) * target.config.hidden_size

    def of(self, name):
        """[`Text`]; answers of one token, in which there is no round, are left out."""
        said, stored, log_p, width = self._texts[name]
        texts = []
        for i in range(len(said)):
            (tokens, answered), (rows, _) = said.document(i), stored.of(i)
            extra, prompt = -len(tokens) % features.BUCKET, int(np.argmax(answered))
            if len(tokens) - prompt > 1:
                texts.append(Text(
                    jnp.asarray(np.pad(tokens.astype(np.int32), (0, extra))),
                    jnp.asarray(np.pad(rows[:, :width], ((0, extra), (0, 0)))), prompt, tokens[prompt:].astype(np.int32),
                    None if log_p is None else log_p[said.starts[i] + prompt:said.starts[i + 1]]))
        return texts


def log_p_of(target, tokens):
    """float32 [S]: the log-probability of each token behind those before it, 0 for the first."""
    padded = jnp.asarray(np.pad(tokens.astype(np.int32), (0, -len(tokens) % features.BUCKET))[None])
    hidden, _ = target_lib.forward(target.config, target.params, padded)
    return np.concatenate([[np.float32(0)], np.asarray(_log_p(target.config, target.params, hidden, padded))[:len(tokens) - 1]])


@jax.jit
def _picked(logits, following):
    return jnp.take_along_axis(logits, following[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)


def _log_p(config, params, hidden, tokens):
    return _picked(target_lib.head(config, params, hidden)[0, :-1], tokens[0, 1:])


def decode(target, drafter, prompts, description, batch_size, **options) -> ds.Result:
    """`ds.generate`, ``batch_size`` prompts at a time, those of like length together; in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    parts = []
    for start in tqdm.trange(0, len(order), batch_size, desc=description, leave=False, dynamic_ncols=True):
        batch = [prompts[i] for i in order[start:start + batch_size]]
        parts.append(ds.generate(target, drafter, batch, seed=start, **options))
    merged, back = measure.side_by_side(parts), np.argsort(order)
    rows = {field.name: getattr(merged, field.name) for field in dataclasses.fields(merged)}
    return ds.Result(**{name: [found[i] for i in back] if found else found for name, found in rows.items()})
