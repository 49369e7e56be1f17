"""Decoding: what comes out is what the target alone would say, token for token or in law, whatever drafts it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
import pairs
from dspark_jax import decoding, generation
from dspark_jax import drafter as drafter_lib
from dspark_jax.scheduling import Schedule

V, T, STEPS, CONTEXT = 16, 4, 30, 124
PROMPTS = [[3, 5, 7], [11], [2, 2, 9, 4, 15, 8, 1, 6, 0, 12], [14, 13, 3, 3, 10]]


@functools.cache
def target(vocab_size=V, head_spread=0.6):
    """Mostly a table of bigrams, with an influence of the whole context: drafts are now good, now bad."""
    return pairs.random_target(seed=4, vocab_size=vocab_size, tie_word_embeddings=False, head_spread=head_spread,
                               depth=0.4, max_position_embeddings=CONTEXT)


@functools.cache
def drafter(transition="vanilla", layout="anchor_first", draft_ids=None, of=target, **fields):
    """Random, but where the transition allows it its table is the bigram part of the target."""
    t = of()
    d = t.config.hidden_size
    if transition in ("vanilla", "joint"):  # the backbone knows nothing: let it say little
        fields.setdefault("output_multiplier", 0.3)
    made = pairs.random_drafter(t, transition=transition, layout=layout, rank=d, **fields,
                                draft_ids=None if draft_ids is None else np.array(draft_ids))
    tables = made.params.get("transition", {})
    if transition in ("vanilla", "joint"):
        e = np.asarray(t.embedding())
        tables["predecessor"] = jnp.asarray(e / np.sqrt(np.mean(e**2, axis=-1, keepdims=True)))
        tables["successor"] = made.head_rows
    if transition == "joint":
        tables["gate_bias"] += 3.0
    return made


@functools.cache
def plain(steps=STEPS):
    return ds.generate(target(), None, PROMPTS, max_new_tokens=steps, stop_tokens=[]).tokens


def rounds_fit_tokens(result, row, limit, stops=()):
    """What accepted and proposed say about the number of tokens of one row."""
    tokens, accepted, proposed = result.tokens[row], result.accepted[row], result.proposed[row]
    assert len(accepted) == len(proposed)
    assert all(0 <= m <= n <= T for m, n in zip(accepted, proposed))
    assert all(m < T or n == T for m, n in zip(accepted[:-1], proposed[:-1]))
    produced = 1 + sum(m + 1 for m in accepted)
    before = produced - (accepted[-1] + 1 if accepted else 0)
    if tokens[-1] in stops and accepted and before + accepted[-1] == len(tokens):
        assert accepted[-1] == proposed[-1]  # ended inside the drafts: nothing behind was proposed, nothing added
    else:
        assert before < len(tokens) <= produced if accepted else len(tokens) == 1
        assert len(tokens) == min(produced, limit)


# ------------------------------------------------------------------------------------------------------------- greedy


SOME = (0, 1, 3, 5, 6, 7, 8, 10, 12, 13, 15)  # target ids of a draft vocabulary
CASES = [
    ("none", "sequential", dict(layout="anchor_first")),
    ("none", "lattice", dict(layout="fill_in", draft_ids=SOME)),
    ("vanilla", "sequential", dict(layout="fill_in", draft_ids=SOME)),
    ("vanilla", "lattice", dict(layout="anchor_first")),
    ("context", "sequential", dict(layout="anchor_first", confidence=True, confidence_with_predecessor=False)),
    ("context", "lattice", dict(layout="fill_in", draft_ids=SOME, conv_kernel_size=2)),
    ("joint", "sequential", dict(layout="fill_in", output_multiplier=0.5, final_logit_softcapping=4.0)),
    ("joint", "lattice", dict(layout="anchor_first", draft_ids=SOME, confidence=True)),
    ("recurrent", "sequential", dict(layout="anchor_first", draft_ids=SOME)),
    ("recurrent", "sequential", dict(layout="fill_in", confidence=True)),
]


@pytest.mark.parametrize("transition, execution, fields", CASES)
def test_greedy_equals_plain(transition, execution, fields):
    """Prompts of different lengths in one batch, any drafter, both ways to run it."""
    draft = drafter(transition, **fields)
    result = ds.generate(target(), draft, PROMPTS, max_new_tokens=STEPS, stop_tokens=[], execution=execution)
    assert result.tokens == plain()
    flat = [m for row in result.accepted for m in row]
    assert 0 < sum(flat) and min(flat) < T, flat
    for row in range(len(PROMPTS)):
        rounds_fit_tokens(result, row, STEPS)
    assert all(n == T for row in result.proposed for n in row)
    assert result.accepted_length == pytest.approx(np.mean([m + 1 for m in flat]))
    if transition == "vanilla":
        assert result.accepted_length > 1.5 and {0, 1, 2} < set(flat)
    if draft.config.confidence:
        seen = set()
        for threshold in (0.3, 0.7, 1.0):
            result = ds.generate(target(), draft, PROMPTS, max_new_tokens=STEPS, stop_tokens=[], execution=execution,
                                 confidence_threshold=threshold)
            assert result.tokens == plain()
            for row in range(len(PROMPTS)):
                rounds_fit_tokens(result, row, STEPS)
            proposed = {n for row in result.proposed for n in row}
            seen |= proposed
        assert proposed == {0} and len(seen) > 1  # nothing is surer than 1: only the anchor is verified


TABLE = 1 / (1 + 0.1 * np.arange(len(PROMPTS) * (T + 1) + 1))  # any curve keeps the law
SCHEDULES = [Schedule("causal", steps_per_second=TABLE), Schedule("lagged", steps_per_second=TABLE),
             Schedule("static", length=2), Schedule("static", length=0), Schedule("threshold", threshold=0.6)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.mode}{s.length or ''}")
def test_scheduled_equals_plain(schedule):
    """Rows verify different numbers of drafts, in fewer tokens than the whole block has; some end before others."""
    draft = drafter(confidence=True)
    for stops in ([], [plain()[0][2], plain()[1][7]]):
        expected = ds.generate(target(), None, PROMPTS, max_new_tokens=STEPS, stop_tokens=stops).tokens
        result = ds.generate(target(), draft, PROMPTS, max_new_tokens=STEPS, stop_tokens=stops, schedule=schedule)
        assert result.tokens == expected
        for row in range(len(PROMPTS)):
            rounds_fit_tokens(result, row, STEPS, stops)
        lengths = {n for row in result.proposed for n in row}
        if schedule.mode == "static" and not stops:
            assert lengths == {schedule.length}
        assert [len(c) for c in result.confidence] == [len(m) for m in result.accepted]
        assert {np.shape(x) for c in result.confidence for x in c} == {(T,)}
    assert schedule.mode == "static" or len(lengths) > 1


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_other_ways_to_candidates():
    """Over a sharded vocabulary, also with the batch laid out, and by approx_max_k, which is exact on a CPU."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = functools.partial(ds.generate, target(), prompts=PROMPTS, max_new_tokens=STEPS, temperature=1.0, candidates=3,
                            execution="lattice", stop_tokens=[])
    calls = []

    def counted(choose):
        return lambda logits, M: calls.append(logits.shape) or choose(logits, M)

    for K in (0, 2):
        d = drafter_lib.with_successors(drafter(), K)
        expected = run(d)
        for choose in (ds.candidates.over_mesh(mesh, "tensor"), ds.candidates.over_mesh(mesh, "tensor", "data"),
                       ds.candidates.approximate_candidates):
            assert run(dataclasses.replace(d, choose=counted(choose))) == expected
    assert calls == [(len(PROMPTS), T, V)] * 6


@pytest.mark.parametrize("B, T, expected", [
    (8, 3, [8, 16, 24, 32]), (8, 7, [8, 24, 40, 56, 64]), (1, 3, [1, 4]), (3, 5, [3, 8, 16, 18]),
    (32, 7, [32, 88, 144, 200, 256])])
def test_sizes_of_scheduled_rounds(B, T, expected):
    """From no drafts to all of them, whole tiles of eight tokens between."""
    assert decoding.buckets(B, T) == expected


def test_calibrated_confidence_decides():
    """The temperatures divide the recorded logits; what is recorded stays raw."""
    draft = drafter(confidence=True)
    cold = dataclasses.replace(draft, config=dataclasses.replace(draft.config, confidence_temperatures=(0.5, 1, 2, 4)))
    for d, temperatures in ((draft, np.ones(T)), (cold, np.array([0.5, 1, 2, 4]))):
        result = ds.generate(target(), d, PROMPTS, max_new_tokens=STEPS, stop_tokens=[], confidence_threshold=0.55)
        for logits, proposed in zip(result.confidence, result.proposed):
            sure = 1 / (1 + np.exp(-np.array(logits) / temperatures)) >= 0.55
            assert proposed == np.cumprod(sure, axis=-1).sum(-1).tolist()


def test_greedy_and_sampled_rows_share_a_batch():
    result = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[], temperature=[0, 1.0, 0, 0.7])
    assert [result.tokens[i] for i in (0, 2)] == [plain()[i] for i in (0, 2)]
    assert all(result.tokens[i] != plain()[i] for i in (1, 3))
    sampled = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[], temperature=1.0)
    assert result.tokens[1] == sampled.tokens[1]  # as alone: its random numbers are its own


def test_no_new_tokens():
    result = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=0)
    assert result.tokens == result.accepted == result.proposed == [[]] * len(PROMPTS)


@pytest.mark.parametrize("where, message", [
    ("layers_1", "the target's weight layers_1.mlp.up_proj.weight is not finite"),
    ("overflow", "the output of the target's layer 1 is not finite, though all its weights are"),
    ("drafter", "the drafter's weight backbone.fc.weight is not finite")])
def test_numbers_that_are_not_finite(where, message):
    """Said in words, not decoded: a bad weight by its name, an overflow by its layer."""
    t, d = target(), drafter()
    spoil = lambda tree, path, change: jax.tree_util.tree_map_with_path(
        lambda p, a: change(a) if ".".join(k.key for k in p) == path else a, tree)
    if where == "drafter":
        d = dataclasses.replace(d, params=spoil(d.params, "backbone.fc.weight", lambda a: a.at[0, 0].set(jnp.inf)))
    else:
        change = (lambda a: a.at[1, 2].set(jnp.nan)) if where == "layers_1" else (lambda a: a * 1e38)
        t = dataclasses.replace(t, params=spoil(t.params, "layers_1.mlp.up_proj.weight", change))
    with pytest.raises(ValueError, match=r"prompts\[\d\], after \d+ new tokens: " + re.escape(message)):
        ds.generate(t, d, PROMPTS, max_new_tokens=4)


def test_plain_is_repeated_argmax():
    """The slow obvious version: the whole sequence anew for each token."""
    for prompt, tokens in zip(PROMPTS, plain()):
        sequence = list(prompt)
        for token in tokens[:8]:
            logits = target().logits(np.array([sequence + [0] * (24 - len(sequence))]))[0, len(sequence) - 1]
            assert token == int(np.argmax(logits))
            sequence.append(token)


def test_plain_result():
    result = ds.generate(target(), None, PROMPTS[:2], max_new_tokens=5, stop_tokens=[])
    assert [len(t) for t in result.tokens] == [5, 5]
    assert result.accepted == result.proposed == [[], []]
    assert result.accepted_length == 1.0


def test_all_candidates_equal_sequential():
    """The lattice with M = V drafts what the sequential formula drafts: the same rounds."""
    run = functools.partial(ds.generate, target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[])
    assert run(execution="lattice", candidates=V).accepted == run(execution="sequential").accepted


def test_batch_equals_each_prompt_alone():
    together = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[])
    for row, prompt in enumerate(PROMPTS):
        alone = ds.generate(target(), drafter(), [prompt], max_new_tokens=STEPS, stop_tokens=[])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.accepted[0] == together.accepted[row]
        assert alone.proposed[0] == together.proposed[row]


@pytest.mark.parametrize("draft", [False, True])
def test_exact_max_new_tokens(draft):
    for limit in (1, 2, 3, 4, 5, 6, 7, 11):
        result = ds.generate(target(), drafter() if draft else None, PROMPTS, max_new_tokens=limit, stop_tokens=[])
        assert result.tokens == [row[:limit] for row in plain()]
        if draft:
            for row in range(len(PROMPTS)):
                rounds_fit_tokens(result, row, limit)


def test_stop_tokens():
    """Every id as the stop token once, and two of them together: in the drafts, as the target's own, as the first."""
    ends = set()
    for stops in [*([v] for v in range(V)), [plain()[0][2], plain()[1][0]]]:
        result = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=stops)
        for row, expected in enumerate(plain()):
            end = next((i + 1 for i, token in enumerate(expected) if token in stops), STEPS)
            assert result.tokens[row] == expected[:end]
            rounds_fit_tokens(result, row, STEPS, stops)
            accepted, proposed = result.accepted[row], result.proposed[row]
            if expected[end - 1] in stops:
                inside = accepted and 1 + sum(m + 1 for m in accepted) == end + 1
                ends.add("first" if end == 1 else "draft" if inside else "own")
                assert not inside or accepted[-1] == proposed[-1]
        assert ds.generate(target(), None, PROMPTS, max_new_tokens=STEPS, stop_tokens=stops).tokens == result.tokens
    assert ends == {"first", "draft", "own"}


def test_stop_tokens_of_the_target():
    stop = target().config.stop_tokens
    assert stop == (0,)
    same = [ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=s).tokens for s in (None, stop)]
    assert same[0] == same[1]


def test_stream_is_generate():
    steps = list(ds.stream(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[]))
    whole = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[])
    assert steps[0].tokens == [[row[0]] for row in whole.tokens]
    assert steps[0].accepted == steps[0].proposed == [[]] * len(PROMPTS)
    assert all(len(accepted) <= 1 for step in steps for accepted in step.accepted)
    assert ds.Result.join(steps) == whole
    few = list(ds.stream(target(), drafter(), PROMPTS, max_new_tokens=STEPS, stop_tokens=[], rounds=4))
    assert ds.Result.join(few) == whole and len(few) == 1 + -(-(len(steps) - 1) // 4)


# ------------------------------------------------------------------------------------------------------------ sampled


@pytest.mark.parametrize("execution", ["sequential", "lattice"])
def test_seeds(execution):
    run = functools.partial(ds.generate, target(), drafter(), PROMPTS, max_new_tokens=STEPS, temperature=1.0,
                            stop_tokens=[], execution=execution)
    first = run(seed=7)
    assert run(seed=7) == first
    assert all(a != b for a, b in zip(run(seed=8).tokens, first.tokens))
    same = ds.generate(target(), drafter(), PROMPTS[:1] * 4, max_new_tokens=STEPS, temperature=1.0, stop_tokens=[],
                       execution=execution, seed=7).tokens
    assert same[0] == first.tokens[0]  # a row's random numbers don't depend on what shares its batch
    assert len({tuple(row) for row in same}) == 4  # equal prompts get different answers


def test_top_k_of_one_is_greedy():
    result = ds.generate(target(), drafter(), PROMPTS, max_new_tokens=STEPS, temperature=1.0, top_k=1, stop_tokens=[])
    assert result.tokens == plain()


# ------------------------------------------------------------------------------------------------------- compilations


def test_few_programs_are_compiled():
    """Within a bucket nothing is compiled again, whatever the lengths, acceptance, temperature and stop tokens."""
    counters = (decoding.prefill, decoding.decode)
    for f in counters:
        f.clear_cache()  # other tests may have run the same shapes
    rng, before = np.random.default_rng(0), [f._cache_size() for f in counters]
    growth = lambda: [f._cache_size() - n for f, n in zip(counters, before)]
    for lengths, limit, temperature, stops in [
            ((3, 60), 20, 0.0, []), ((64, 1), 30, 0.7, [3]), ((10, 10), 59, 0.0, [1, 2]), ((33, 5), 1, 1.5, None)]:
        prompts = [rng.integers(0, V, n).tolist() for n in lengths * 2]
        ds.generate(target(), drafter(), prompts, max_new_tokens=limit, temperature=temperature, stop_tokens=stops,
                    seed=limit)
    assert growth() == [1, 1]
    longer, before = [[1] * 65, [2], [3] * 9, [4]], [f._cache_size() for f in counters]
    for limit in (20, 59):
        ds.generate(target(), drafter(), longer, max_new_tokens=limit)  # the next bucket of prompts, the same cache
    assert growth() == [1, 0]


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("arguments, message", [
    (dict(prompts=[]), "prompts: empty list; give at least one prompt"),
    (dict(prompts=[[1], []]), "prompts[1]: empty prompt; give at least one token"),
    (dict(prompts=[[1], [2, 16]]), "prompts[1]: token id 16 is outside the vocabulary [0, 16)"),
    (dict(prompts=[[-1]]), "prompts[0]: token id -1 is outside the vocabulary [0, 16)"),
    (dict(prompts=[[1.5]]), "prompts[0]: 1.5 is not a token id"),
    (dict(prompts=[["a"]]), "prompts[0]: 'a' is not a token id"),
    (dict(prompts=["text"]), "prompts[0]: 't' is not a token id"),
    (dict(prompts=[1, 2]), "prompts[0]: 1 is not a list of token ids"),
    (dict(prompts=[[1] * 125]), "prompts[0]: 125 tokens and 8 new ones exceed the target's context of 124"),
    (dict(prompts=[[1] * 117]), "prompts[0]: 117 tokens and 8 new ones exceed the target's context of 124"),
    (dict(max_new_tokens=-1), "max_new_tokens: -1; must be a whole number of at least 0"),
    (dict(temperature=[0.0, 1.0]), "temperature: shape (2,); allowed: one number, or one for each of the 1 prompts"),
    (dict(temperature=[-1.0]), "temperature: got -1.0; allowed: finite numbers >= 0"),
    (dict(temperature=-0.5), "temperature: got -0.5; allowed: finite numbers >= 0, 0 for greedy decoding"),
    (dict(temperature=float("nan")), "temperature: got nan; allowed: finite numbers >= 0"),
    (dict(top_k=-1), "top_k: got -1; allowed: whole numbers >= 0"),
    (dict(top_p=0.0), "top_p: got 0.0; allowed: 0 < top_p <= 1"),
    (dict(top_p=1.5), "top_p: got 1.5; allowed: 0 < top_p <= 1"),
    (dict(stop_tokens=[16]), "stop_tokens: token id 16 is outside the vocabulary [0, 16)"),
    (dict(execution="tree"), "execution: unknown name 'tree'; allowed: sequential, lattice"),
    (dict(execution="lattice", candidates=17), "candidates: 17; must lie in [1, 16], the draft vocabulary"),
    (dict(execution="lattice", candidates=0), "candidates: 0; must lie in [1, 16], the draft vocabulary"),
    (dict(confidence_threshold=0.5), "confidence_threshold: this drafter has no confidence head; only 0 is allowed"),
    (dict(schedule=Schedule("lagged", steps_per_second=np.ones(6))), "schedule: mode 'lagged' goes by confidences, and"),
    (dict(schedule=Schedule("causal", steps_per_second=np.ones(5))), "steps_per_second: 5 entries, for at most 4 tokens"),
    (dict(schedule=Schedule("causal")), "steps_per_second: missing; the mode 'causal' needs it"),
    (dict(schedule=Schedule("static", length=5)), "length: 5; must be an integer in [0, 4]"),
    (dict(schedule=Schedule("hopeful")), "mode: unknown name 'hopeful'; allowed: causal, lagged, static, threshold"),
    (dict(confidence_threshold=1.5), "confidence_threshold: 1.5; must lie in [0, 1]"),
    (dict(verification="typical"), "verification: unknown name 'typical'; allowed: token, block"),
    (dict(transition="recurrent", execution="lattice"), "'recurrent' depends on the whole path; use 'sequential'"),
])
def test_bad_input(arguments, message):
    """Refused at the call, by `stream` too, before anything is computed."""
    draft = drafter(arguments.pop("transition", "vanilla"))
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 8} | arguments
    for call in (ds.generate, ds.stream):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            call(target(), draft, **arguments)
        assert "\n" not in str(error.value)


def test_the_whole_context_can_be_used():
    """All its positions, and the last block reaches over them: the cache is as long as block and bucket need."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V, n).tolist() for n in (CONTEXT - 8, 1, CONTEXT - 9, 30)]
    assert CONTEXT + T == generation.CACHE_BUCKET
    run = functools.partial(ds.generate, target(), prompts=prompts, max_new_tokens=8, stop_tokens=[])
    assert run(drafter=drafter()).tokens == run(drafter=None).tokens


def test_numpy_prompts():
    """Arrays are lists of ids too."""
    prompts = [np.array(p, np.int32) for p in PROMPTS]
    assert ds.generate(target(), None, prompts, max_new_tokens=STEPS, stop_tokens=[]).tokens == plain()
