"""Answers prompts with the target itself: the text that a drafter of that target learns from.

  python -m train.regenerate --source=code --count=500 --out=runs/code.jsonl
  python -m train.regenerate --prompts=my_prompts.jsonl --out=runs/mine.jsonl --tokens=runs/mine.npz
  python -m train.regenerate --out=runs/code.jsonl --tokens=runs/code.npz      (only packs what is there)

Prompts come from a bundled source or from a JSON lines file of conversations:
  {"id": "a1", "messages": [{"role": "user", "content": "What is a prime number?"}]}
A conversation of several turns is answered turn by turn, each with the target's own earlier answers before it: answers
that are in the file already are replaced. Each conversation is appended to --out as one line as soon as its batch is
done. Run the same command again after an interruption: conversations whose id is in --out already are passed over, and
a last line that was cut off is dropped. At the end the lines stand in the order of the prompts. --out itself is chat
data that train.main reads; --tokens is a smaller file that opens at once.

An answer depends on --seed and on the prompts that share its batch. Batches are made from the list of prompts, answered
or not, so that an interrupted run ends with the answers of an uninterrupted one. A longer list or another --batch_size
makes other batches and so other answers; all of them are exact samples of the target.
"""

import collections.abc
import hashlib
import json
import pathlib
import time

import tqdm
from absl import flags

import dspark_jax as ds
from dspark_jax.data import chat, conversations, documents, sources
from dspark_jax.whole_files import replacing
from train import command_line, measure

_TARGET = flags.DEFINE_string(
    "target", "smollm2-135m-instruct", "Who answers: a Hugging Face directory, a .gguf file, or smollm2-135m-instruct."
)
_OUT = flags.DEFINE_string("out", None, "JSON lines file that the answers are appended to.", required=True)
_TOKENS = flags.DEFINE_string("tokens", None, "At the end, pack all of --out into this token file (.npz) for training.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSON lines file of prompts.")
_SOURCE = flags.DEFINE_enum(
    "source", None, sources.TRAINING_SOURCES, "Bundled source of prompts, in place of --prompts."
)
_COUNT = flags.DEFINE_integer("count", None, "How many prompts to take; all by default.", lower_bound=1)
_SKIP = flags.DEFINE_integer("skip", 0, "How many prompts to leave out before them.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Sampling temperature; 0 takes the likeliest token.", lower_bound=0.0
)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k likeliest tokens; 0: from all.", lower_bound=0)
_TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "Sample from the likeliest tokens that hold this much probability.", lower_bound=0.0, upper_bound=1.0
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 192, "An answer is cut after this many tokens.", lower_bound=1)
_MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 512, "Longer prompts are left out.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Prompts decoded together.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Changes the samples.", lower_bound=0)


def main():
    if _PROMPTS.value and _SOURCE.value:
        raise ValueError("--prompts and --source: allowed: one of them")
    out = pathlib.Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = answered_ids(out)
    if _PROMPTS.value or _SOURCE.value:
        prompts = read_prompts()
        left = sum(prompt.id not in done for prompt in prompts)
        print(f"{len(prompts)} prompts, {len(prompts) - left} of them answered in {out} already")
        if left:
            answer(measure.load_target(_TARGET.value), prompts, done, out)
        sort_answers(out, prompts)
    elif not _TOKENS.value:
        raise ValueError(
            f"no prompts: allowed: --prompts=FILE or --source={'|'.join(sources.TRAINING_SOURCES)}, "
            "or --tokens=FILE to pack --out"
        )
    if _TOKENS.value:
        packed = pack(out)
        pathlib.Path(_TOKENS.value).parent.mkdir(parents=True, exist_ok=True)
        packed.save(_TOKENS.value)
        print(f"{_TOKENS.value}: {len(packed)} conversations, {int(packed.loss_mask.sum())} answer tokens")


def read_prompts() -> list[conversations.Conversation]:
    """The prompts that the flags ask for. Raises ValueError naming the line or id of one that cannot be answered."""
    if _SOURCE.value:
        return sources.training_prompts(_SOURCE.value, _COUNT.value, _SKIP.value)
    prompts, seen = [], set()
    for prompt in conversations.read_conversations(_PROMPTS.value):
        if prompt.id in seen:  # a resumed run goes by the ids
            raise ValueError(f"{_PROMPTS.value}: id {prompt.id!r} occurs twice; allowed: each id once")
        seen.add(prompt.id)
        prompts.append(prompt)
    chosen = prompts[_SKIP.value :][: _COUNT.value]
    if not chosen:
        raise ValueError(f"{_PROMPTS.value}: {len(prompts)} prompts, none left after --skip={_SKIP.value}")
    return chosen


def answered_ids(path: pathlib.Path) -> set:
    """Ids of the answers in `path`, empty where there is no file. A last line without its end (the process was killed)
    is cut off the file.

    Raises:
      ValueError: another line is not an answer.
    """
    if not path.exists():
        return set()
    with open(path, "rb+") as file:
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
        if end != file.seek(0, 2):
            print(f"{path}: the last line was cut off when a run was stopped; dropping it")
            file.truncate(end)
    return {conversation.id for conversation, _ in _answers(path)}


def turns(messages: collections.abc.Iterable[dict]) -> list[list[dict]]:
    """What is said before each answer: the messages that are no answers, divided where the answers are."""
    groups = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif groups[-1]:
            groups.append([])
    return groups if groups[-1] else groups[:-1]


def answer(target, prompts: list[conversations.Conversation], done: set, out: pathlib.Path) -> None:
    """Appends the target's answers to those prompts whose id is not in `done`, batch by batch."""
    encoded = [(prompt, target.tokenizer.chat(turns(prompt.messages)[0])) for prompt in prompts]
    short = [pair for pair in encoded if len(pair[1]) <= _MAX_PROMPT_TOKENS.value]
    if len(short) < len(encoded):
        limit = _MAX_PROMPT_TOKENS.value
        print(f"left out: {len(encoded) - len(short)} prompts of more than --max_prompt_tokens={limit}")
    total, ended, start = 0, 0, time.monotonic()
    with (
        open(out, "a", encoding="utf-8") as file,
        tqdm.tqdm(total=sum(p.id not in done for p, _ in short), unit="answer") as progress,
    ):
        for batch in batches(short, _BATCH_SIZE.value):
            todo = [prompt.id not in done for prompt, _ in batch]
            if not any(todo):
                continue
            for (prompt, _), (messages, answers), wanted in zip(batch, _answer_batch(target, batch), todo):
                # A batch that was half written is answered again as a whole: the samples depend on all of it.
                if wanted:
                    file.write(_line(prompt, messages, answers))
                    ended += len(answers) < len(turns(prompt.messages))
                total += sum(len(answer_tokens) for _, answer_tokens in answers)
            file.flush()
            progress.update(sum(todo))
            progress.set_postfix_str(f"{total / (time.monotonic() - start):.0f} tokens/s")
    if ended:
        print(f"cut: {ended} conversations, before a turn whose prompt has more than "
              f"--max_prompt_tokens={_MAX_PROMPT_TOKENS.value}")


def _answer_batch(target, batch):
    """[(messages with the answers, [(prompt tokens, answer tokens) of each turn])] for a batch of (prompt, tokens of
    its first turn). A conversation ends before a turn whose prompt has become too long."""
    groups = [turns(prompt.messages) for prompt, _ in batch]
    talks = [(list(first), []) for first, *_ in groups]
    current = {i: tokens for i, (_, tokens) in enumerate(batch)}  # conversation -> the prompt of its turn
    turn = 0
    while current:
        ids = json.dumps([batch[i][0].id for i in current])
        result = ds.generate(
            target,
            None,
            list(current.values()),
            max_new_tokens=_MAX_NEW_TOKENS.value,
            temperature=_TEMPERATURE.value,
            top_k=_TOP_K.value,
            top_p=_TOP_P.value,
            seed=_hash(f"{_SEED.value} {ids}" + (f" turn {turn}" if turn else "")) % 2**31,
        )
        turn, following = turn + 1, {}
        for (i, prompt_tokens), answer_tokens in zip(current.items(), result.tokens):
            messages, answers = talks[i]
            answers.append((prompt_tokens, [int(t) for t in answer_tokens]))
            messages.append({"role": "assistant", "content": target.tokenizer.decode(answers[-1][1])})
            if turn < len(groups[i]):
                tokens = target.tokenizer.chat([*messages, *groups[i][turn]])
                if len(tokens) <= _MAX_PROMPT_TOKENS.value:
                    messages += groups[i][turn]
                    following[i] = tokens
        current = following
    return talks


def _line(prompt, messages, answers):
    ids, loss_mask = join_turns(answers)
    row = {
        "id": prompt.id,
        "source": prompt.source,
        "conversations": messages,
        "temperature": _TEMPERATURE.value,
        "input_ids": ids,
        "loss_mask": loss_mask,
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def join_turns(answers: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """(ids, loss mask of zeros and ones) of a conversation from (prompt tokens, answer tokens) of each of its turns.

    The ids are the last prompt and its answer. An earlier answer is supervised if it stands in that prompt just as it
    was sampled, behind the prompt it was sampled for: some answers have other ids when their text is encoded again.
    """
    ids = [*answers[-1][0], *answers[-1][1]]
    loss_mask = [0] * len(ids)
    for prompt_tokens, answer_tokens in answers:
        end = len(prompt_tokens) + len(answer_tokens)
        if ids[:end] == prompt_tokens + answer_tokens:
            loss_mask[len(prompt_tokens) : end] = [1] * len(answer_tokens)
    return ids, loss_mask


def sort_answers(path: pathlib.Path, prompts: list[conversations.Conversation]) -> None:
    """Brings the lines of `path` into the order of the prompts, behind lines that answer none of them."""
    place = {prompt.id: i for i, prompt in enumerate(prompts)}
    lines, start = [], 0  # (place, first byte, number of bytes)
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                lines.append((place.get(json.loads(line)["id"], -1), start, len(line)))
            start += len(line)
        order = sorted(lines, key=lambda line: line[0])
        if order == lines:
            return
        with replacing(path) as ordered:
            for _, begin, size in order:
                file.seek(begin)
                ordered.write(file.read(size))


def batches(pairs: list, size: int) -> collections.abc.Iterator[list]:
    """Pairs of (prompt, tokens) in batches of similar length, which waste little on padding. They are sorted within
    stretches of the list only, so that a list that grows at its end keeps its earlier batches."""
    stretch = 16 * size
    for start in range(0, len(pairs), stretch):
        by_length = sorted(pairs[start : start + stretch], key=lambda pair: len(pair[1]))
        yield from (by_length[i : i + size] for i in range(0, len(by_length), size))


def pack(path: pathlib.Path) -> documents.Documents:
    """The token file's content for a file of answers, in the order of its lines. Raises ValueError naming the line."""
    return documents.Documents.pack((*tokens, conversation.source) for conversation, tokens in _answers(path))


def _answers(path) -> collections.abc.Iterator[tuple[conversations.Conversation, tuple]]:
    """(conversation, (ids, loss mask)) of each line."""
    for number, row in conversations.read_rows(path):
        try:
            conversation = conversations.parse_conversation(row)
            if "prompt_tokens" in row and "answer_tokens" in row:  # lines of one turn, as they were written earlier
                parts = (row["prompt_tokens"], 0), (row["answer_tokens"], 1)
                if not all(isinstance(part, list) for part, _ in parts):
                    raise ValueError("fields prompt_tokens and answer_tokens: allowed: lists of token ids")
                row = {"input_ids": [t for part, _ in parts for t in part],
                       "loss_mask": [spoken for part, spoken in parts for _ in part]}
            tokens = chat.parse_ids(row)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        yield conversation, tokens


def _hash(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


if __name__ == "__main__":
    command_line.run(main)
