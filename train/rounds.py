"""Rounds of real decoding: what the confidence head said of each draft, and how many the target took.

They are kept in a file (.npz) that is written again after every batch, so that collecting can be interrupted, and made
larger later: prompts that are in it are not decoded again.

Shape letters: N rounds, T draft positions, P prompts.
"""

import dataclasses
import hashlib
import json
import pathlib
import zipfile
import zlib

import jax
import numpy as np
import tqdm

import dspark_jax as ds
from dspark_jax.whole_files import replacing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """Round by round, in the order of decoding within each prompt.

    Attributes:
      confidence: float32 [N, T], raw logits of the confidence head.
      accepted, proposed: int32 [N]; proposed is T, less where the round ended at an accepted stop token.
      prompt, set: str [N], id of the prompt and name of its set.
      done: str [P], ids of all prompts that were decoded.
      settings: what the rounds depend on besides the prompts.
    """

    confidence: np.ndarray
    accepted: np.ndarray
    proposed: np.ndarray
    prompt: np.ndarray
    set: np.ndarray
    done: np.ndarray
    settings: dict

    def __len__(self):
        return len(self.accepted)

    def where(self, chosen: np.ndarray) -> "Rounds":
        """The rounds for which ``chosen``, bool [N], is true."""
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in _BY_ROUND})

    def halves(self) -> tuple["Rounds", "Rounds"]:
        """The rounds of one half of the prompts, and of the other; which half a prompt is in is a matter of its id."""
        first = np.array([hashlib.sha256(f"half {name}".encode()).digest()[0] % 2 == 0 for name in self.prompt], bool)
        return self.where(first), self.where(~first)

    def save(self, path) -> None:
        """Atomically."""
        with replacing(path) as file:
            np.savez(file, settings=json.dumps(self.settings), **{name: getattr(self, name) for name in _ARRAYS})

    @classmethod
    def load(cls, path) -> "Rounds":
        """What `save` wrote. Raises FileNotFoundError, or ValueError that begins with the path."""
        try:
            with np.load(path, allow_pickle=False) as file:
                rounds = cls(settings=json.loads(str(file["settings"])), **{name: file[name] for name in _ARRAYS})
        except FileNotFoundError:
            raise
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged, or no file of rounds ({error})") from None
        if rounds.confidence.ndim != 2 or any(getattr(rounds, n).shape != (len(rounds.confidence),) for n in _BY_ROUND[1:]):
            raise ValueError(f"{path}: its arrays do not belong together")
        return rounds


_BY_ROUND = ("confidence", "accepted", "proposed", "prompt", "set")
_ARRAYS = (*_BY_ROUND, "done")


def collect(target, drafter, prompts, file=None, *, batch_size: int, max_new_tokens: int, temperature: float,
            execution: str | None = None) -> Rounds:
    """Decode ``prompts`` (`Conversation`s; their sources are the sets), all drafts put to verification.

    file: .npz to go on from, if there is one, and to keep the rounds in. The other arguments are those of `ds.generate`.
    Returns the rounds of these prompts. Raises ValueError for a drafter without a confidence head, and for a file whose
    rounds were made otherwise.
    """
    if not drafter.config.confidence:
        raise ValueError("--drafter: has no confidence head; only one that was trained with it can be calibrated")
    T = drafter.config.block_length
    settings = {
        "target": fingerprint(target.config, target.params), "drafter": fingerprint(drafter.config, drafter.params),
        "execution": execution or drafter.config.execution, "max_new_tokens": max_new_tokens, "temperature": temperature}
    if file is not None and pathlib.Path(file).exists():
        rounds = Rounds.load(file)
        for name, value in settings.items():
            if rounds.settings.get(name) != value:
                raise ValueError(f"--rounds: {file} was made with {name} {rounds.settings.get(name)}, and now it is "
                                 f"{value}; choose another file")
    else:
        none = np.zeros(0, np.str_)
        rounds = Rounds(confidence=np.zeros((0, T), np.float32), accepted=np.zeros(0, np.int32),
                        proposed=np.zeros(0, np.int32), prompt=none, set=none, done=none, settings=settings)
    done = set(rounds.done.tolist())
    todo = [(prompt, target.tokenizer.chat(prompt.messages)) for prompt in prompts if prompt.id not in done]
    todo.sort(key=lambda pair: len(pair[1]))  # prompts of similar length waste little on padding
    with tqdm.tqdm(total=len(todo), unit="prompt", disable=not todo, leave=False, dynamic_ncols=True) as progress:
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            ids = [prompt.id for prompt, _ in batch]
            result = ds.generate(
                target, drafter, [tokens for _, tokens in batch], max_new_tokens=max_new_tokens, temperature=temperature,
                execution=execution, seed=int.from_bytes(hashlib.sha256(json.dumps(ids).encode()).digest()[:3]))
            rounds = _append(rounds, batch, result)
            if file is not None:
                rounds.save(file)
            progress.update(len(batch))
            progress.set_postfix_str(f"{len(rounds)} rounds")
    return rounds.where(np.isin(rounds.prompt, [prompt.id for prompt in prompts]))


def _append(rounds, batch, result):
    T = rounds.confidence.shape[1]
    counts = [len(accepted) for accepted in result.accepted]
    new = {
        "confidence": np.reshape([logits for row in result.confidence for logits in row], (-1, T)).astype(np.float32),
        "accepted": np.concatenate(result.accepted).astype(np.int32),
        "proposed": np.concatenate(result.proposed).astype(np.int32),
        "prompt": np.repeat([prompt.id for prompt, _ in batch], counts),
        "set": np.repeat([prompt.source for prompt, _ in batch], counts),
        "done": np.array([prompt.id for prompt, _ in batch]),
    }
    return dataclasses.replace(
        rounds, **{name: np.concatenate([getattr(rounds, name), values]) for name, values in new.items()})


def fingerprint(config, params) -> str:
    """Changes with the weights and with every field of the config but the temperatures of its confidence head."""
    if hasattr(config, "confidence_temperatures"):
        config = dataclasses.replace(config, confidence_temperatures=())
    digest = hashlib.sha256(repr(config).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
