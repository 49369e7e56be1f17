"""What the cells of experiments.measure say: accepted lengths with their intervals, and the tables made of them.

Every table is a list of rows of text, its first row the header. Cells that are not there are collected in `missing`.
"""

import numpy as np

from dspark_jax.data import sources
from experiments import cells, six

SETS = sources.EVALUATION_SOURCES
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # candidates
SWEPT = ("vanilla", "joint")  # drafters that are run with each of them
BLOCKS = (3, 7, 11, 15)
PARTS = ("greedy", "sampled", "times")
NATIVE = {name: "lattice 16" if name == "selector" else "sequential" for name in six.SIX}
TITLES = {"none": "DFlash", "vanilla": "DSpark, vanilla", "joint": "DSpark, joint-gated", "recurrent": "DSpark, recurrent",
          "context": "context-gated, trained as a Markov head", "selector": "DFlash-2, convolution and Selector"}


class Results:
    """greedy, sampled, times: the cells of the files of these names, {} where there is none."""

    def __init__(self, **parts):
        self.greedy, self.sampled, self.times = (parts.get(part, {}) for part in PARTS)
        self.missing = []

    @classmethod
    def read(cls, folder):
        """Of folder/greedy.json and so on. Raises ValueError where they are of different data, target or code."""
        found = {}
        for part in PARTS:
            if (folder / f"{part}.json").exists():
                found[part] = cells.read(folder / f"{part}.json")
        stamps = {part: stamp for part, (stamp, _) in found.items()}
        for part, stamp in stamps.items():
            first = next(iter(stamps))
            different = [name for name in cells.STAMP if stamp[name] != stamps[first][name]]
            if different:
                raise ValueError(f"{folder}: {first}.json and {part}.json were measured with different "
                                 f"{' and '.join(different)}; measure one of them again")
        return cls(**{part: cells_of_part for part, (_, cells_of_part) in found.items()})

    def cell(self, part, name):
        found = getattr(self, part).get(name)
        if found is None and f"{part}: {name}" not in self.missing:
            self.missing.append(f"{part}: {name}")
        return found

    def length(self, part, drafter, way, sets=SETS):
        """(accepted length, lower, upper) over prompts of each of ``sets``, as `bootstrap`; None if a cell is missing."""
        found = [self.cell(part, f"{drafter}/{name}/{way}") for name in sets]
        if None in found:
            return None
        return bootstrap([(cell["committed"], cell["rounds"]) for cell in found])

    def acceptance(self, part, drafter, way, sets=SETS):
        """[T]: the share of rounds that accepted draft t among those that came to it, over all prompts of the sets."""
        found = [self.cell(part, f"{drafter}/{name}/{way}") for name in sets]
        if None in found:
            return None
        reached, accepted = (np.sum([cell[name] for cell in found], axis=0) for name in ("reached", "accepted"))
        return [float(a / r) if r else float("nan") for a, r in zip(accepted, reached)]

    def milliseconds(self, drafter, way):
        found = self.cell("times", f"{drafter}/{way}")
        return None if found is None else 1e3 * found["median"]


def summary(rounds, T):
    """Plain values of the (accepted, proposed) lists of some prompts: "committed" and "rounds" of each prompt, and by
    position how many rounds "reached" it and how many "accepted" it."""
    pairs = [(a, p) for accepted, proposed in rounds for a, p in zip(accepted, proposed)]
    return {"committed": [sum(accepted) + len(accepted) for accepted, _ in rounds],
            "rounds": [len(accepted) for accepted, _ in rounds],
            "reached": [sum(a >= t and p > t for a, p in pairs) for t in range(T)],
            "accepted": [sum(a > t for a, _ in pairs) for t in range(T)]}


def bootstrap(sets, draws=2000, seed=0):
    """The mean over ``sets`` of sum(committed) / sum(rounds), and the 2.5 and 97.5 % quantiles of what it is when the prompts
    of each set are drawn again with replacement. sets: pairs (committed, rounds) of int [P], of each prompt."""
    rng, means, again = np.random.default_rng(seed), [], []
    for pair in sets:
        committed, rounds = (np.asarray(values, np.float64) for values in pair)
        chosen = rng.integers(len(rounds), size=(draws, len(rounds)))
        means.append(committed.sum() / rounds.sum())
        again.append(committed[chosen].sum(axis=1) / rounds[chosen].sum(axis=1))
    return float(np.mean(means)), *(float(q) for q in np.quantile(np.mean(again, axis=0), (0.025, 0.975)))


def of_drafters(results, part):
    """Accepted length of the six, each run as it was made to be; also without the target's own token of each round."""
    rows = [["drafter", *SETS, "mean", "95 %", "against DFlash", "in accepted drafts"]]
    base = results.length(part, "none", NATIVE["none"])
    for name in six.SIX:
        by_set = [results.length(part, name, NATIVE[name], [s]) for s in SETS]
        mean = results.length(part, name, NATIVE[name])
        rows.append([TITLES[name], *(number(length) for length in by_set), number(mean), interval(mean),
                     *([percent(mean, base), percent(mean, base, without=1)] if name != "none" else ["", ""])])
    return rows


def by_position(results, part):
    """Conditional acceptance of the six."""
    shares = {name: results.acceptance(part, name, NATIVE[name]) for name in six.SIX}
    T = max((len(row) for row in shares.values() if row), default=0)
    return [["drafter", *(f"draft {t + 1}" for t in range(T))],
            *([TITLES[name], *(f"{share:.3f}" for share in row)] for name, row in shares.items() if row)]


def implication_1(results):
    """The context-gated head, trained over the whole vocabulary and run both ways, beside the Selector."""
    rows = [["trained as", "run as", "accepted length, temperature 0", "95 %", "temperature 1", "95 %", "backbone, ms",
             "head, ms"]]
    for name, way in (("context", "sequential"), ("context", "lattice 16"), ("selector", "sequential"),
                      ("selector", "lattice 16")):
        cold = results.length("greedy", name, way)
        warm = results.length("sampled", name, way)
        rows.append([TITLES[name], way, number(cold), interval(cold), number(warm), interval(warm),
                     milliseconds(results.milliseconds(name, "backbone")), milliseconds(results.milliseconds(name, way))])
    return rows


def implication_2(results, name):
    """A first-order head run with fewer and fewer candidates, without retraining."""
    rows = [["candidates", "temperature 0", "against sequential", "with a union of halves", "against sequential",
             "temperature 1", "against sequential", "head, ms", "with a union, ms"]]
    cold, warm = (results.length(part, name, "sequential") for part in ("greedy", "sampled"))
    for M in COUNTS:
        some, both = results.length("greedy", name, f"lattice {M}"), None
        sampled = results.length("sampled", name, f"lattice {M}")
        if M > 1:
            both = results.length("greedy", name, f"union {M}")
        rows.append([str(M), number(some), percent(some, cold), number(both), percent(both, cold), number(sampled),
                     percent(sampled, warm), milliseconds(results.milliseconds(name, f"lattice {M}")),
                     milliseconds(results.milliseconds(name, f"union {M}") if M > 1 else None)])
    rows.append(["all (sequential)", number(cold), "", "", "", number(warm), "",
                 milliseconds(results.milliseconds(name, "sequential")), ""])
    return rows


def loses_at_most(results, name, share=0.01):
    """The smallest number of candidates from which on a lattice loses at most ``share`` of the accepted length; None where
    the largest one measured still loses more."""
    whole, found = results.length("greedy", name, "sequential"), None
    for M in reversed(COUNTS):
        length = results.length("greedy", name, f"lattice {M}")
        if None in (whole, length) or length[0] < (1 - share) * whole[0]:
            break
        found = M
    return found


def head_room(results, M=16):
    """What the M best of the base logits hold, and how much of it the head finds.

    oracle: the accepted length of the path that takes the text's token wherever it is a candidate. realised: the part of
    the way from the base logits' best tokens alone (one candidate) to the oracle that the lattice goes.
    """
    rows = [["drafter", *(f"recall@{M}, draft {t}" for t in (1, 4, 7)), "best of the base logits", f"lattice {M}",
             f"oracle of {M}", "realised"]]
    for name in six.SIX:
        ranks = [results.cell("greedy", f"{name}/{s}/ranks") for s in SETS]
        if None in ranks:
            continue
        recall = np.mean([cell["recall"][str(M)] for cell in ranks], axis=0)
        oracle, alone = (np.mean([cell["oracle"][str(k)] for cell in ranks]) for k in (M, 1))
        way = {"none": "sequential", "recurrent": "sequential"}.get(name, f"lattice {M}")
        length = results.length("greedy", name, way)
        if length is None:
            continue
        realised = (length[0] - alone) / (oracle - alone)
        rows.append([TITLES[name], *(f"{recall[t - 1]:.3f}" for t in (1, 4, 7)), f"{alone:.3f}", number(length),
                     f"{oracle:.3f}", f"{100 * realised:.0f} %"])
    return rows


def rules(results):
    """The token rule and the block rule at temperature 1."""
    rows = [["drafter", "run as", "token rule", "95 %", "block rule", "95 %", "gain"]]
    for name, way in NATIVE.items():
        token, block = (results.length("sampled", name, f"{way}{rule}") for rule in ("", ", block rule"))
        rows.append([TITLES[name], way, number(token), interval(token), number(block), interval(block), percent(block, token)])
    return rows


def block_lengths(results):
    """One drafter, trained with 15 drafts a block, run with fewer."""
    rows = [["block (anchor and drafts)", *SETS, "mean", "95 %"]]
    for T in BLOCKS:
        way = f"sequential T={T}"
        mean = results.length("greedy", "long", way)
        rows.append([str(T + 1), *(number(results.length("greedy", "long", way, [s])) for s in SETS), number(mean),
                     interval(mean)])
    return rows


def learning_curve(results, before, step):
    """The backbone alone (DFlash) after each kept step of its training. before: positions that it had been trained on when
    it began; step: positions a step. -> rows of (positions, (accepted length, lower, upper))."""
    steps = sorted({int(name.split("/")[0].split()[1]) for name in results.greedy if name.startswith("backbone ")})
    return [(before + at * step, results.length("greedy", f"backbone {at}", "sequential")) for at in steps]


def number(length):
    return "-" if length is None else f"{length[0]:.3f}"


def interval(length):
    return "-" if length is None else f"{length[1]:.3f} to {length[2]:.3f}"


def percent(length, base, without=0):
    """How much longer, in per cent, ``without`` so many tokens of both."""
    if length is None or base is None:
        return "-"
    return f"{100 * ((length[0] - without) / (base[0] - without) - 1):+.1f} %"


def milliseconds(value):
    return "-" if value is None else f"{value:.2f}"


def markdown(rows):
    """A table, its first row the header."""
    header, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *body])
