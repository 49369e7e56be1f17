"""Part `decode` of `train.benchmark`: what a draft-verify round costs, part by part, and what it gains.

Rounds are built here from the library's functions, as one program and as one program for each part, and timed beside
one step of plain decoding. The parts are called in the order of a round, so that each finds the caches of the processor
as it would there. Then prompts are decoded by `ds.generate`, plainly and speculatively by turns.

Shape letters: B batch, Q new tokens, S cache length, T draft positions, V vocabulary, D model width, M candidates.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import dspark_jax as ds
from dspark_jax import cache as kv
from dspark_jax import decoding, sampling
from dspark_jax.drafter import base_logits, block_hidden, check_execution, propose
from dspark_jax.transitions import get_transition
from dspark_jax.verification import SparseDraft, get_verification
from train import measure, timing
from train.benchmark_head import candidates_of, scores_and_walk, sequential
from train.replay import replay

EXPLANATION = """\
plain step      the target on one token in one program; its decoder, and its logits and draw, as programs of their own
round           draft, verify and commit in one program; below it, its parts as programs of their own
backbone        the drafter's layers            head            the draft logits
candidates      the best of each position       scores + walk   pair scores, and the way through them
sequential      instead of these two, where the drafter is run so
verify          the target's layers on T+1 tokens
logits, rule    its logits on them, and which drafts stay
commit          the drafter's keys and values of T+1 positions"""


class Rows(NamedTuple):
    """Where the rows of a batch stand: anchors, starts int [B], keys [B], temperature []."""

    anchors: jax.Array
    starts: jax.Array
    keys: jax.Array
    temperature: jax.Array


class Caches:
    """The target's and the drafter's keys and values: programs donate them and put back what they return."""

    def __init__(self, target, drafter, batch, length):
        t, b = target.config, drafter.config.backbone
        dtype = jnp.result_type(*jax.tree.leaves(target.params))
        wide = jnp.result_type(dtype, *jax.tree.leaves(drafter.params["backbone"]))
        self.target = kv.empty_cache(t.num_hidden_layers, batch, length, t.num_key_value_heads, t.head_dim, dtype)
        self.draft = kv.empty_cache(b.num_hidden_layers, batch, length, b.num_key_value_heads, b.head_dim, wide)


def process(options, params, tokens, starts, cache):
    """`decoding.process` at positions starts + 0..Q-1: tokens int [B, Q], starts int [B]."""
    return decoding.process(options, params, tokens, starts[:, None] + jnp.arange(tokens.shape[1]), cache)


def draw(options, params, hidden, rows):
    """The token after each of hidden [B, 1, D]."""
    return decoding.draw(options, rows.keys, decoding.logits_of(options, params, hidden[:, 0]), rows.temperature)


def plain_step(options, params, rows, cache):
    """-> (next token [B], cache)."""
    hidden, _, cache = process(options, params, rows.anchors[:, None], rows.starts, cache)
    return draw(options, params, hidden, rows), cache


def judge(options, params, hidden, tokens, q, rows):
    """The token rule: hidden [B, T+1, D], drafts [B, T] and their q -> accepted [B], next token [B]."""
    p = sampling.probabilities(decoding.logits_of(options, params, hidden), rows.temperature)
    return jax.vmap(get_verification(options.verification))(rows.keys, p, tokens, q)


def full_round(options, params, drafter, rows, cache, context):
    """-> ((accepted, next token), target cache, drafter cache)."""
    proposal = propose(options.drafter, drafter["params"], drafter["embedding"], drafter["head_rows"],
                       drafter["draft_to_target"], context, *rows, options.execution, options.candidates,
                       text=jnp.zeros((len(rows.anchors), context[0][0].shape[2]), jnp.int32))
    block = jnp.concatenate([rows.anchors[:, None], proposal.tokens], axis=1)
    hidden, features, cache = process(options, params, block, rows.starts, cache)
    verdict = judge(options, params, hidden, proposal.tokens, proposal.q, rows)
    return verdict, cache, decoding.extend_context(options, drafter, features, rows.starts, context)


def options_of(target, drafter=None, execution=None):
    """What a greedy or sampled round without a schedule is compiled for; a plain step where there is no drafter."""
    config = drafter.config if drafter else None
    return decoding.Options(target=target.config, drafter=config, top_k=0, top_p=1.0, execution=execution,
                            candidates=config.usable_candidates if drafter else None,
                            verification="token", schedule=None)


def plain_programs(target, caches, rows):
    """{name: call} of one plain step as a whole and in parts."""
    options, params = options_of(target), target.params
    whole = jax.jit(functools.partial(plain_step, options), donate_argnums=2)
    decoder = jax.jit(functools.partial(process, options), donate_argnums=3)
    last = jax.jit(functools.partial(draw, options))
    hidden = jnp.zeros((len(rows.anchors), 1, target.config.hidden_size), caches.target[0][0].dtype)

    def call_whole():
        token, caches.target = whole(params, rows, caches.target)
        return token

    def call_decoder():
        hidden, _, caches.target = decoder(params, rows.anchors[:, None], rows.starts, caches.target)
        return hidden

    return {"plain step": call_whole, "decoder": call_decoder, "logits, draw": lambda: last(params, hidden, rows)}


def round_programs(target, drafter, execution, caches, rows):
    """{name: call} of one round as a whole and then of its parts, in their order."""
    config, arrays, params = drafter.config, drafter.arrays(), target.params
    transition, table = get_transition(config.transition), drafter.params.get("transition", {})
    options = options_of(target, drafter, execution)
    whole = jax.jit(functools.partial(full_round, options), donate_argnums=(3, 4))
    backbone = jax.jit(functools.partial(block_hidden, config))
    head = jax.jit(functools.partial(base_logits, config))
    top = jax.jit(functools.partial(candidates_of, M=options.candidates))
    walk = jax.jit(functools.partial(scores_and_walk, transition))
    steps = jax.jit(functools.partial(sequential, transition))
    verify = jax.jit(functools.partial(process, options), donate_argnums=3)
    rule = jax.jit(functools.partial(judge, options))
    extend = jax.jit(functools.partial(decoding.extend_context, options), donate_argnums=3)

    def call_whole():
        verdict, caches.target, caches.draft = whole(params, arrays, rows, caches.target, caches.draft)
        return verdict

    def call_backbone():
        return backbone(drafter.params, drafter.embedding, caches.draft, rows.anchors, rows.starts)

    def call_verify():
        hidden, features, caches.target = verify(params, block, rows.starts, caches.target)
        return hidden, features

    def call_commit():
        caches.draft = extend(arrays, features, rows.starts, caches.draft)
        return caches.draft

    # Each part works on what the one before it gave, computed once.
    hidden = call_backbone()
    logits = head(drafter.head_rows, hidden)
    rest = (hidden, rows.anchors, rows.keys, rows.temperature, drafter.draft_to_target)
    calls = {"round": call_whole, "backbone": call_backbone, "head": lambda: head(drafter.head_rows, hidden)}
    if execution == "lattice":
        ids, scores = top(logits)
        tokens, *q = walk(table, ids, scores, *rest)
        q = SparseDraft(*q)
        calls |= {"candidates": lambda: top(logits), "scores + walk": lambda: walk(table, ids, scores, *rest)}
    else:
        tokens, q = steps(table, logits, *rest)
        if drafter.draft_to_target is not None:
            q = SparseDraft(jnp.broadcast_to(drafter.draft_to_target, q.shape), q)
        calls["sequential"] = lambda: steps(table, logits, *rest)
    block = jnp.concatenate([rows.anchors[:, None], tokens], axis=1)
    verified, features = call_verify()
    return calls | {"verify": call_verify, "logits, rule": lambda: rule(params, verified, tokens, q, rows),
                    "commit": call_commit}


def time_rounds(target, drafters, execution, batch, length, repeats) -> dict:
    """One step of plain decoding and one round of each of ``drafters`` ({T: drafter}) at batch B, on caches of S
    positions filled to the middle."""
    caches = Caches(target, next(iter(drafters.values())), batch, length)
    tokens = jnp.arange(batch, dtype=jnp.int32) % target.config.vocab_size
    starts, keys = jnp.full(batch, length // 2, jnp.int32), jax.random.split(jax.random.key(0), batch)
    rows = Rows(tokens, starts, keys, jnp.float32(0))
    groups = {"plain": plain_programs(target, caches, rows), "memory": timing.memory_reads()}
    groups |= {T: round_programs(target, drafter, execution, caches, rows) for T, drafter in drafters.items()}
    calls = {(group, name): call for group, programs in groups.items() for name, call in programs.items()}
    taken = timing.alternate(calls, repeats, description=f"decode, parts of a round, batch {batch}")
    times = {group: {name: taken[group, name] for name in programs} for group, programs in groups.items()}
    step, rate, read = times["plain"]["plain step"]["median"], timing.memory_rate(times["memory"]), weight_bytes(target)
    rounds = []
    for T in drafters:
        median = {name: t["median"] for name, t in times[T].items()}
        whole = median.pop("round")
        rounds.append({
            "drafts": T, "seconds": times[T], "round_over_plain_step": whole / step,
            "parts_over_round": sum(median.values()) / whole,
            "walk_over_round": median["scores + walk"] / whole if "scores + walk" in median else None,
        })
    floor = read["plain step"] / rate
    return {"batch": batch, "cache_length": length, "plain": times["plain"], "weight_bytes": read, "rounds": rounds,
            "memory_bytes_per_second": rate, "floor_seconds": floor, "floor_over_plain_step": floor / step}


def weight_bytes(target) -> dict[str, int]:
    """The parameters that the programs of a plain step must read; of an input table it is only some rows."""
    head = target.head_rows().nbytes
    tables = head if target.config.tie_word_embeddings else head + target.embedding().nbytes
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)) - tables
    return {"plain step": layers + head, "decoder": layers, "logits, draw": head}


def time_decoding(target, drafters, trained, execution, prompts, max_new_tokens, cost, repeats) -> list[dict]:
    """Decodes ``prompts`` one by one, plainly, with each of ``drafters`` ({T: drafter}), and with drafts that are always
    right (`train.replay`), by turns.

    The pass over the prompt, timed by asking for one token, is taken off before rates are divided by each other,
    because speculative decoding does not shorten it.

    Args:
      trained: the largest T to decode with.
      cost: {T: what a round takes, in plain steps}.

    Returns: one dict per way of decoding, the plain one first. Raises ValueError where no answer has a second token.
    """
    ways = {("plain", None): lambda prompt, n: ds.generate(target, None, [prompt], n)}
    for T, drafter in drafters.items():
        if T <= trained:
            ways["speculative", T] = lambda prompt, n, drafter=drafter: ds.generate(
                target, drafter, [prompt], n, execution=execution)
        ways["replayed", T] = lambda prompt, n, drafter=drafter: replay(
            target, drafter, prompt, latest["plain", None].tokens[0], n)
    latest, results, seconds = {}, {way: [] for way in ways}, {way: [] for way in ways}

    def answer(way, prompt):
        latest[way] = ways[way](prompt, max_new_tokens)

    for i, prompt in enumerate(prompts):
        calls = {(way, "all"): functools.partial(answer, way, prompt) for way in ways}
        calls |= {(way, "first"): functools.partial(decode, prompt, 1) for way, decode in ways.items()}
        times = timing.alternate(calls, repeats, description=f"decode, prompt {i + 1} of {len(prompts)}")
        for way in ways:
            results[way].append(latest[way])
            seconds[way].append((times[way, "first"]["median"], times[way, "all"]["median"]))
    rows = []
    for (mode, T), found in results.items():
        after = sum(len(r.tokens[0]) - 1 for r in found)
        if after < 1:
            raise ValueError("prompts: every answer ends with its first token; decoding cannot be timed on them")
        first, whole = (sum(column) for column in zip(*seconds[mode, T]))
        rounds = [m + 1 for r in found for m in r.accepted[0]]
        row = {"mode": mode, "drafts": T, "prompts": len(found), "tokens": after + len(found), "seconds": whole,
               "prompt_seconds": first, "tokens_per_second": (after + len(found)) / whole,
               "tokens_per_second_after_prompt": after / (whole - first),
               "accepted_length": sum(rounds) / len(rounds) if rounds else 1.0,
               "identical": sum(r.tokens == plain.tokens for r, plain in zip(found, results["plain", None]))}
        if T is not None:
            row["ratio"] = row["tokens_per_second_after_prompt"] / rows[0]["tokens_per_second_after_prompt"]
            row["predicted_ratio"] = row["accepted_length"] / cost[T]
            row["deviation"] = row["ratio"] / row["predicted_ratio"] - 1
        rows.append(row)
    return rows


def time_batch(target, drafter, execution, prompts, max_new_tokens, repeats) -> list[dict]:
    """``prompts`` as one batch beside the same prompts one by one, plainly and, unless ``drafter`` is None,
    speculatively; every answer ``max_new_tokens`` long."""

    def decode(groups, who):
        for group in groups:
            ds.generate(target, who, group, max_new_tokens, stop_tokens=(), execution=execution if who else None)

    modes = {"plain": None} | ({"speculative": drafter} if drafter else {})
    ways = {"batch": [prompts], "single": [[prompt] for prompt in prompts]}
    calls = {(mode, way): functools.partial(decode, groups, who)
             for mode, who in modes.items() for way, groups in ways.items()}
    times = timing.alternate(calls, repeats, description=f"decode, batch of {len(prompts)}")
    rows = []
    for mode, who in modes.items():
        seconds = {way: times[mode, way] for way in ways}
        rates = {way: len(prompts) * max_new_tokens / t["median"] for way, t in seconds.items()}
        rows.append({"mode": mode, "drafts": who.config.block_length if who else None, "batch": len(prompts),
                     "seconds": seconds, "tokens_per_second": rates["batch"],
                     "single_tokens_per_second": rates["single"], "ratio": rates["batch"] / rates["single"]})
    return rows


def run(target, drafter, prompts, *, max_new_tokens, drafts, batches, execution, repeats, decode_repeats) -> dict:
    """Everything of this part -> plain values.

    Rounds are timed for every T in ``drafts`` and every B in ``batches`` and, always, for B = 1; prompts are decoded
    with no more drafts than ``drafter`` was trained for. execution: None for what the drafter declares. repeats,
    decode_repeats: of the programs, and of whole answers.
    """
    config = drafter.config
    execution = execution or config.execution
    check_execution(config, execution, config.usable_candidates)
    config = dataclasses.replace(config, confidence_temperatures=())  # there may be fewer than drafts to be timed
    drafters = {T: dataclasses.replace(drafter, config=dataclasses.replace(config, block_length=T)) for T in drafts}
    length = -(-(max(map(len, prompts)) + max_new_tokens + max(drafts)) // 128) * 128
    rounds = [time_rounds(target, drafters, execution, B, length, repeats) for B in sorted({1, *batches})]
    cost = {r["drafts"]: r["round_over_plain_step"] for r in rounds[0]["rounds"]}
    decoding = time_decoding(target, drafters, config.block_length, execution, prompts, max_new_tokens, cost,
                             decode_repeats)
    speculative = [row for row in decoding if row["mode"] == "speculative"]
    best = drafters[max(speculative, key=lambda row: row["ratio"])["drafts"]] if speculative else None
    several = [row for B in batches if B > 1 for row in time_batch(
        target, best, execution, [prompts[i % len(prompts)] for i in range(B)], max_new_tokens, decode_repeats)]
    return {"execution": execution, "rounds": rounds, "decoding": decoding, "batches": several,
            "floor_over_plain_decoding": rounds[0]["floor_seconds"] * decoding[0]["tokens_per_second_after_prompt"]}


def report(result) -> str:
    """The tables that are printed."""
    tables = [*map(_rounds_table, result["rounds"]), EXPLANATION]
    header = ["decoding", "drafts", "tokens/s", "after the prompt", "ratio", "accepted length", "predicted",
              "deviation", "identical"]
    lines = [[
        row["mode"], str(row["drafts"] or "-"), f"{row['tokens_per_second']:.1f}",
        f"{row['tokens_per_second_after_prompt']:.1f}",
        *((f"{row['ratio']:.2f}", f"{row['accepted_length']:.3f}", f"{row['predicted_ratio']:.2f}",
           f"{row['deviation']:+.1%}") if "ratio" in row else "----"),
        f"{row['identical']}/{row['prompts']}"] for row in result["decoding"]]
    tables.append(measure.table(header, lines) + f"\nplain decoding, after the prompt, goes at "
                  f"{result['floor_over_plain_decoding']:.1%} of the rate at which all weights can be read")
    if result["batches"]:
        header = ["one batch", "drafts", "prompts", "tokens/s", "one by one", "ratio"]
        tables.append(measure.table(header, [[
            row["mode"], str(row["drafts"] or "-"), str(row["batch"]), f"{row['tokens_per_second']:.1f}",
            f"{row['single_tokens_per_second']:.1f}", f"{row['ratio']:.2f}"] for row in result["batches"]]))
    return "\n\n".join(tables)


def _rounds_table(result):
    """One line a program, one column a T."""
    rounds, plain, rate = result["rounds"], result["plain"], result["memory_bytes_per_second"] / 1e9
    header = [f"batch {result['batch']}, cache of {result['cache_length']}, ms",
              *(f"{r['drafts']} draft{'s'[:r['drafts'] > 1]}" for r in rounds)]
    names = list(dict.fromkeys(name for r in rounds for name in r["seconds"]))
    lines = [[name, *[timing.cell(times)] * len(rounds)] for name, times in plain.items()]
    lines += [[name, *(timing.cell(r["seconds"][name]) for r in rounds)] for name in names]
    lines.append(["round / plain step", *(f"{r['round_over_plain_step']:.2f}" for r in rounds)])
    lines.append(["sum of parts / round", *(f"{r['parts_over_round']:.2f}" for r in rounds)])
    if rounds[0]["walk_over_round"] is not None:
        lines.append(["scores + walk / round", *(f"{r['walk_over_round']:.2%}" for r in rounds)])
    read = result["weight_bytes"]
    speeds = ", ".join(f"{name} {size / plain[name]['median'] / 1e9:.1f}" for name, size in read.items())
    floor = (f"reading all weights, {read['plain step'] / 1e9:.3f} GB, at the {rate:.1f} GB/s of a plain reduction: "
             f"{1e3 * result['floor_seconds']:.2f} ms, {result['floor_over_plain_step']:.1%} of a plain step\n"
             f"weights read by each, GB/s: {speeds}")
    return measure.table(header, lines) + "\n" + floor
