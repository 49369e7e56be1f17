"""What is trained on and what is evaluated on never meet. Tests marked `target` need the fetched packages."""

import re

import pytest

from dspark_jax.data import assets, sources


def _words(prompt):
    """The user's words, so that punctuation and case make no difference."""
    return " ".join(re.findall(r"\w+", prompt.messages[-1]["content"].casefold()))


def test_shipped_evaluation_prompts_need_no_network(monkeypatch):
    monkeypatch.setattr(assets, "fetch", lambda package: pytest.fail(f"fetches {package.name}"))
    for name in sources.EVALUATION_SOURCES:
        prompts = sources.evaluation_prompts(name, 60)
        assert len({p.id for p in prompts}) == len({_words(p) for p in prompts}) == 60
        assert all(
            p.source == name and p.id.startswith(f"{name}/") and [m["role"] for m in p.messages] == ["user"]
            for p in prompts
        )
        assert sources.evaluation_prompts(name) == prompts[:20]
        assert sources.evaluation_prompts(name, 0) == []
    assert all(int(p.id.split("/")[1]) >= 1000 for p in sources.evaluation_prompts("gsm8k", 60))
    assert all(sources.is_held_out(p.messages[0]["content"]) for p in sources.evaluation_prompts("chat", 60))
    for p in sources.evaluation_prompts("humaneval", 60):
        assert re.fullmatch(
            r"Complete the following Python function.\n```python\n.*\bdef .*\n```", p.messages[0]["content"], re.DOTALL
        )


def test_the_split_depends_on_words_only():
    assert (
        sources.is_held_out("Hello, anyone here?")
        and sources.is_held_out("  hello anyone HERE")
        and not sources.is_held_out("Hello fellow human!")
    )


def test_a_damaged_evaluation_file_is_named(monkeypatch, tmp_path):
    path = tmp_path / "evaluation_prompts.jsonl"
    path.write_text('{"id": 1}\n')
    monkeypatch.setattr(sources, "_SHIPPED_PROMPTS", path)
    with pytest.raises(ValueError, match=f"^{path}:1: field conversations: missing"):
        sources.evaluation_prompts("chat")


def test_unknown_names():
    with pytest.raises(ValueError, match="source 'humaneval' is unknown; allowed: gsm8k, code, chat, wiki"):
        sources.training_prompts("humaneval")
    with pytest.raises(ValueError, match="source 'wiki' is unknown; allowed: gsm8k, humaneval, chat"):
        sources.evaluation_prompts("wiki")


@pytest.mark.target
def test_the_shipped_prompts_are_the_first_of_all():
    for name, count in (("gsm8k", 319), ("humaneval", 164), ("chat", 241)):
        every = sources.all_evaluation_prompts(name)
        assert len(every) == count
        assert every[:60] == sources.evaluation_prompts(name, 60)
        assert sources.evaluation_prompts(name, 61) == every[:61]


@pytest.mark.target
def test_no_evaluation_prompt_is_trained_on():
    evaluation = {_words(p) for name in sources.EVALUATION_SOURCES for p in sources.all_evaluation_prompts(name)}
    for name, count in (("gsm8k", 1000), ("code", 5996), ("chat", 3069), ("wiki", 50165)):
        training = sources.training_prompts(name)
        assert len({p.id for p in training}) == len(training) == count
        assert not evaluation & {_words(p) for p in training}
    assert not evaluation & sources.shipped_user_words()


@pytest.mark.target
def test_training_prompts_are_chosen_by_count_and_skip():
    every = sources.training_prompts("gsm8k")
    assert sources.training_prompts("gsm8k", 3, skip=2) == every[2:5]
    for count, skip in ((1001, 0), (1, 1000), (-1, 0), (None, -1)):
        with pytest.raises(ValueError, match="source 'gsm8k' has 1000 prompts: cannot take"):
            sources.training_prompts("gsm8k", count, skip)
