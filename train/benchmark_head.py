"""Part `head` of `train.benchmark`: a block's tokens from its base logits, sequentially and on a lattice.

Both executions are called as `dspark_jax.drafter.propose` calls them, on random logits and tables of the transition
"vanilla", at temperature 0. Beside them stands what no way of drafting can save: reading the logits once, timed as a
plain sum over the same array in the same run.

Shape letters: B batch, T draft positions, V vocabulary, M candidates per position, R rank.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from dspark_jax import lattice as lattice_lib
from dspark_jax.sampling import top_candidates
from dspark_jax.sequential import sequential_draft
from dspark_jax.transitions import TRANSITIONS
from train import measure, timing

EXPLANATION = """\
sequential      one token after the other over the whole vocabulary
lattice         candidates, their scores and the walk, in one program
candidates      the best tokens of each position alone
scores + walk   what the lattice does after that, alone
read            a plain sum over the same logits"""


def sequential(transition, params, logits, hidden, anchors, keys, temperature, draft_to_target=None):
    """`sequential_draft` for a batch: logits [B, T, Vd], hidden [B, T, D], anchors int [B], keys [B] -> tokens, q."""
    one = lambda u, h, a, k: sequential_draft(transition, params, u, h, a, k, temperature, draft_to_target)[:2]
    return jax.vmap(one)(logits, hidden, anchors, keys)


def lattice(transition, params, logits, hidden, anchors, keys, temperature, candidates, draft_to_target=None):
    """`lattice_draft` for a batch -> tokens [B, T], candidates and q [B, T, M]; arguments as in `sequential`."""
    one = lambda u, h, a, k: lattice_lib.lattice_draft(
        transition, params, u, h, a, k, temperature, candidates, draft_to_target)
    return jax.vmap(one)(logits, hidden, anchors, keys)


def candidates_of(logits, M):
    """`top_candidates` for a batch: ids and scores [B, T, M]."""
    return jax.vmap(lambda u: top_candidates(u, M))(logits)


def scores_and_walk(transition, params, ids, scores, hidden, anchors, keys, temperature, draft_to_target=None):
    """`draft_among` for a batch: ids and scores of `candidates_of` -> as `lattice`."""
    one = lambda i, s, h, a, k: lattice_lib.draft_among(transition, params, i, s, h, a, k, temperature, draft_to_target)
    return jax.vmap(one)(ids, scores, hidden, anchors, keys)


def run(*, vocab, rank, candidates, drafts, batches, repeats, budget) -> list[dict]:
    """Times every T in ``drafts`` with every B in ``batches`` -> a dict of plain values for each.

    repeats, budget: of `timing.alternate`.
    """
    transition, keys = TRANSITIONS["vanilla"], jax.random.split(jax.random.key(0), 3)
    shapes = transition.parameter_shapes(vocab, vocab, 1, rank)
    params = {name: 0.02 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}
    rows = []
    for B, T in itertools.product(batches, drafts):
        logits = jax.random.normal(keys[-1], (B, T, vocab))
        rest = (jnp.zeros((B, T, 1)), jnp.arange(B) % vocab, jax.random.split(keys[-1], B), jnp.float32(0))
        programs = {
            "sequential": (functools.partial(sequential, transition), params, logits, *rest),
            "lattice": (functools.partial(lattice, transition, candidates=candidates), params, logits, *rest),
            "candidates": (functools.partial(candidates_of, M=candidates), logits),
            "scores + walk": (functools.partial(scores_and_walk, transition), params,
                              *jax.jit(candidates_of, static_argnums=1)(logits, candidates), *rest),
            "read": (jnp.sum, logits),
        }
        calls = {name: functools.partial(jax.jit(f), *inputs) for name, (f, *inputs) in programs.items()}
        # The sequential walk takes a hundred times as long and leaves caches and threads in disorder: it goes by itself.
        times = {}
        for group in (["sequential"], [name for name in calls if name != "sequential"]):
            times |= timing.alternate({name: calls[name] for name in group}, repeats, budget, settle=True,
                                      description=f"head, batch {B}, {T} drafts")
        median = {name: t["median"] for name, t in times.items()}
        rows.append({
            "batch": B, "drafts": T, "logits_bytes": logits.nbytes, "seconds": times,
            "read_bytes_per_second": logits.nbytes / median["read"],
            "lattice_over_read": median["lattice"] / median["read"],
            "sequential_over_lattice": median["sequential"] / median["lattice"],
        })
    return rows


def report(rows) -> str:
    """The table that is printed."""
    names = list(rows[0]["seconds"])
    header = ["batch", "drafts", *(f"{name}, ms" for name in names), "read, GB/s", "lattice/read", "sequential/lattice"]
    lines = [[str(row["batch"]), str(row["drafts"]), *(timing.cell(row["seconds"][name]) for name in names),
              f"{row['read_bytes_per_second'] / 1e9:.1f}", f"{row['lattice_over_read']:.2f}",
              f"{row['sequential_over_lattice']:.1f}"] for row in rows]
    return f"{measure.table(header, lines)}\n\n{EXPLANATION}"
