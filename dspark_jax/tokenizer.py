"""Text <-> token ids, and chat messages -> the ids of a prompt.

Control tokens (``<|im_end|>`` and the like) steer the model, so text that comes from a user must never become one.
`Tokenizer.encode` therefore reads them as plain text, and `Tokenizer.chat` lets only the chat template write them:
control strings inside a message are broken with a marker character before the template runs, and the marker is taken
out again when the pieces between the template's own control tokens are encoded.
"""

import collections.abc
import json
import pathlib
import re

import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

ROLES = ("system", "user", "assistant", "tool")

# Tokens that end an answer in the model families read here, apart from the ones that a file declares.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")

# GGUF names its pre-tokenizer instead of describing it: tokenizer.ggml.pre -> what it stands for.
_PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}
_CONTROL = 3  # a value of tokenizer.ggml.token_type


class Tokenizer:
    """A target's tokenizer. Build it with `from_gguf`, `from_file` or `from_directory`.

    Attributes:
      stop_tokens: tuple of ids that end an answer, the declared end token first.
      vocab_size: number of ids the tokenizer knows; a model's vocabulary may be padded beyond it.
      chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        stop_tokens: tuple[int, ...] = (),
        template_values: dict | None = None,
    ):
        self._backend = backend
        backend.encode_special_tokens = True  # the library's name for: read control strings as plain text
        self._control = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        # Longest first, so that no control token hides inside another one's match.
        self._control_pattern = re.compile(
            "|".join(re.escape(t) for t in sorted(self._control, key=len, reverse=True)) or r"(?!)"
        )
        self.stop_tokens = tuple(stop_tokens)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self._template = None if chat_template is None else _compile(chat_template)
        self._template_values = dict(template_values or {})

    @classmethod
    def from_gguf(cls, metadata: dict) -> "Tokenizer":
        """From the metadata of a GGUF file, {key: Python value}.

        Raises:
          ValueError: a field is missing or malformed, or the kind of tokenizer is not supported; names the field and
              what is allowed.
        """
        if (model := _field(metadata, "tokenizer.ggml.model", str)) != "gpt2":
            raise ValueError(f"tokenizer.ggml.model: {model!r} is not supported; allowed: 'gpt2' (byte-level BPE)")
        if (pre := _field(metadata, "tokenizer.ggml.pre", str)) not in _PRE_TOKENIZERS:
            allowed = ", ".join(map(repr, _PRE_TOKENIZERS))
            raise ValueError(f"tokenizer.ggml.pre: {pre!r} is not supported; allowed: {allowed}")
        tokens = _field(metadata, "tokenizer.ggml.tokens", list)
        types = _field(metadata, "tokenizer.ggml.token_type", list)
        merges = [tuple(merge.split(" ")) for merge in _field(metadata, "tokenizer.ggml.merges", list)]
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise ValueError("tokenizer.ggml.tokens: some tokens occur twice")
        if len(types) != len(tokens):
            raise ValueError(f"tokenizer.ggml.token_type: {len(types)} entries for {len(tokens)} tokens")
        for i, merge in enumerate(merges):
            if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab or merge[0] + merge[1] not in vocab:
                raise ValueError(
                    f"tokenizer.ggml.merges[{i}]: {' '.join(merge)!r} is not two tokens that join to a third"
                )
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(t, special=True, normalized=False)
                for t, kind in zip(tokens, types)
                if kind == _CONTROL
            ]
        )

        def token(name):
            i = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if i is not None and not 0 <= i < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id: {i} is outside the vocabulary of {len(tokens)}")
            return None if i is None else tokens[i]

        return cls(
            backend,
            chat_template=metadata.get("tokenizer.chat_template"),
            stop_tokens=_stop_tokens(backend, [vocab[t] for t in (token("eos"), token("eot")) if t is not None]),
            template_values={"bos_token": token("bos") or "", "eos_token": token("eos") or ""},
        )

    @classmethod
    def from_file(cls, tokenizer_json, config_json=None, template_file=None, generation_json=None) -> "Tokenizer":
        """From Hugging Face files: tokenizer.json and, where there are, tokenizer_config.json, chat_template.jinja,
        generation_config.json.

        Raises:
          FileNotFoundError: a file that was named is not there.
          ValueError: a file is not what its name says; the message starts with its path.
        """
        text = pathlib.Path(tokenizer_json).read_text(encoding="utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{tokenizer_json}: not a tokenizer of the tokenizers library: {error}") from None
        config = _read_json(config_json) if config_json is not None else {}
        generation = _read_json(generation_json) if generation_json is not None else {}
        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}.get("default")
        if template_file is not None:
            template = pathlib.Path(template_file).read_text(encoding="utf-8")
        if template is not None and not isinstance(template, str):
            raise ValueError(
                f"{config_json}: chat_template: {type(template).__name__} found; allowed: text, or a list of templates"
            )
        values = {f"{name}_token": _token_text(config.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk")}
        declared = [backend.token_to_id(values["eos_token"])]
        from_generation = generation.get("eos_token_id")
        declared += from_generation if isinstance(from_generation, list) else [from_generation]
        if any(i is not None and (isinstance(i, bool) or not isinstance(i, int) or i < 0) for i in declared):
            raise ValueError(
                f"{generation_json}: eos_token_id: {from_generation!r} found; allowed: an id or a list of ids"
            )
        stop_tokens = _stop_tokens(backend, [i for i in declared if i is not None])
        return cls(backend, chat_template=template, stop_tokens=stop_tokens, template_values=values)

    @classmethod
    def from_directory(cls, folder) -> "Tokenizer | None":
        """From a Hugging Face model directory; None where it has no tokenizer.json. Raises as `from_file`."""
        paths = [
            pathlib.Path(folder) / n
            for n in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
        ]
        if not paths[0].is_file():
            return None
        return cls.from_file(*(path if path.is_file() else None for path in paths))

    def encode(self, text: str, control_tokens: bool = False) -> list[int]:
        """Ids of a text; no begin token is added. Control strings become control tokens only where `control_tokens` is
        True (never do that to a user's text).

        Raises:
          TypeError: `text` is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode takes a str, not {type(text).__name__}")
        if control_tokens:
            return self._encode_pieces(text, marker="")
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, control_tokens: bool = False) -> str:
        """Text of a sequence of ids. Control tokens are left out unless `control_tokens` is True; ids of a padded
        vocabulary have no text.

        Bytes that are no valid UTF-8 (an answer cut inside a character) become U+FFFD.

        Raises:
          ValueError: an id is negative or not an integer.
        """
        ids = [_as_id(i) for i in ids]
        return self._backend.decode(ids, skip_special_tokens=not control_tokens)

    def chat(self, messages: collections.abc.Sequence[dict], **template_values) -> list[int]:
        """Ids of the prompt for a conversation, ending where the assistant's next answer starts.

        Without a system message the template decides whether there is a default one.

        Args:
          messages: {"role": one of `ROLES`, "content": str}, at least one.
          **template_values: more variables for the template, such as enable_thinking=False.

        Raises:
          ValueError: there is no chat template, a message is malformed (says which), or the template refuses the
              conversation.
        """
        broken, marker = self._break_control_strings(messages)
        return self._encode_pieces(self._render(broken, True, template_values), marker)

    def conversation(
        self, messages: collections.abc.Sequence[dict], limit: int | None = None, **template_values
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation up to its last answer, and which of them the assistant says.

        An answer starts where `chat` of the messages before it ends, and is encoded by itself, as it is when a model
        writes it; it ends with the next stop token, which belongs to it. No message's text can move either.

        Args:
          messages: as for `chat`, at least one of them the assistant's.
          limit: at most so many ids; the rest is not even encoded.
          **template_values: as for `chat`.

        Raises:
          ValueError: as `chat`, or there is no answer, the template writes no stop token behind one, or it writes the
              messages before an answer differently once that is there.
        """
        broken, marker = self._break_control_strings(messages)
        while broken and broken[-1]["role"] != "assistant":
            broken.pop()
        if not broken:
            raise ValueError("messages: none of the assistant; allowed: at least one")
        text = self._render(broken, False, template_values)
        ids, spoken, done = [], [], 0
        for i, message in enumerate(broken):
            if message["role"] != "assistant":
                continue
            if limit is not None and len(ids) >= limit:
                break
            before = self._render(broken[:i], True, template_values)
            if len(before) < done or not text.startswith(before):
                raise ValueError(f"chat template: what it writes before messages[{i}] changes once that is there")
            ends = (match.end() for match in self._control_pattern.finditer(text, len(before))
                    if self._control[match[0]] in self.stop_tokens)
            if (end := next(ends, None)) is None:
                raise ValueError(f"chat template: it writes no stop token behind messages[{i}]")
            for piece, by_assistant in ((text[done:len(before)], False), (text[len(before):end], True)):
                new = self._encode_pieces(piece, marker)
                ids += new
                spoken += [by_assistant] * len(new)
            done = end
        return ids[:limit], spoken[:limit]

    def _break_control_strings(self, messages):
        """(messages in whose contents a marker character breaks every control string, the marker)."""
        if self._template is None:
            raise ValueError("this tokenizer has no chat template: encode the text with encode()")
        messages = list(messages)
        check_messages(messages)
        used = self.chat_template + "".join(m["content"] for m in messages)
        # A private-use character that occurs nowhere. The range is long enough unless a message spells out all of it.
        marker = next((chr(c) for c in range(0xF0000, 0xF4000) if chr(c) not in used), None)
        if marker is None:
            raise ValueError("messages: every character from U+F0000 to U+F3FFF occurs; at least one must be free")
        broken = [
            {**m, "content": self._control_pattern.sub(lambda match: match[0][0] + marker + match[0][1:], m["content"])}
            for m in messages
        ]
        return broken, marker

    def _render(self, messages, add_generation_prompt, template_values):
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**(self._template_values | template_values | values))
        except Exception as error:  # the template is a program of the model's makers: it can fail in any way
            raise ValueError(f"chat template: {error}") from error

    def _encode_pieces(self, text, marker):
        """Control strings of `text` become their ids; what lies between them is plain text, from which `marker` is
        removed."""
        ids, start = [], 0
        for match in self._control_pattern.finditer(text):
            ids += self.encode(text[start : match.start()].replace(marker, ""))
            ids.append(self._control[match[0]])
            start = match.end()
        return ids + self.encode(text[start:].replace(marker, ""))


class TextStream:
    """Turns ids that come a few at a time into text that can be printed at once: a character cut between two ids waits
    for its rest.

    The increments of `push`, and `finish` at the end, join to exactly `tokenizer.decode(all ids)`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids = []
        self._context = 0  # ids before this one no longer influence the text that follows
        self._shown = 0  # ids before this one have been printed

    def push(self, ids) -> str:
        """The new printable text after `ids` (possibly empty)."""
        self._ids += ids
        return self._advance(keep_back=True)

    def finish(self) -> str:
        """What was held back; incomplete bytes become U+FFFD."""
        return self._advance(keep_back=False)

    def _advance(self, keep_back):
        # Some decoders treat the start of a text differently (leading spaces), so the last printed ids are decoded
        # again as context.
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        text = self._tokenizer.decode(self._ids[self._context :])
        if keep_back and text.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(before) :]


def check_messages(messages) -> None:
    """Raises ValueError unless `messages` is a non-empty list of {"role": one of `ROLES`, "content": str}; says which
    message and field is wrong."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError('messages: at least one {"role", "content"} is needed')
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f'messages[{i}]: {type(message).__name__} found; allowed: {{"role", "content"}}')
        if message.get("role") not in ROLES:
            raise ValueError(f"messages[{i}].role: {message.get('role')!r} found; allowed: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"messages[{i}].content: {type(message.get('content')).__name__} found; allowed: text")


def _compile(template):
    # The template comes from a model file: the sandbox keeps it from reaching Python objects.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _stop_tokens(backend, declared):
    # Only control tokens: in some vocabularies "</s>" is an ordinary piece of text.
    control = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return tuple(dict.fromkeys([*declared, *(control[t] for t in _END_TOKENS if t in control)]))


def _token_text(token):
    """tokenizer_config.json writes a token as text, as {"content": text}, or as null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _field(metadata, name, kind):
    if not isinstance(value := metadata.get(name), kind):
        found = "missing" if value is None else f"{type(value).__name__} found"
        raise ValueError(f"{name}: {found}; allowed: {kind.__name__}")
    return value


def _as_id(i):
    try:
        i = i.__index__()
    except AttributeError:
        raise ValueError(f"token id {i!r} is not an integer") from None
    if i < 0:
        raise ValueError(f"token id {i} is negative")
    return i


def _read_json(path):
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__} found; allowed: an object")
    return value
