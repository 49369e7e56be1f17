"""The pictures of the experiments. Drawing needs matplotlib, which is an extra of this package."""

import numpy as np
from matplotlib.figure import Figure

from experiments import results as results_lib
from experiments import six


def draw(results, curve, folder):
    """Writes acceptance.png, candidates.png and learning.png; of what is missing nothing is drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    acceptance(results).savefig(folder / "acceptance.png", dpi=120)
    candidates(results).savefig(folder / "candidates.png", dpi=120)
    learning(results, curve).savefig(folder / "learning.png", dpi=120)


def acceptance(results):
    """By position, how many of the rounds that come to it accept the draft: the paper's Figure 2."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for panel, (part, title) in zip(figure.subplots(1, 2, sharey=True), (("greedy", "temperature 0"),
                                                                        ("sampled", "temperature 1"))):
        for i, name in enumerate(six.SIX):
            shares = results.acceptance(part, name, results_lib.NATIVE[name])
            if shares:
                panel.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=f"C{i}",
                           label=results_lib.TITLES[name])
        panel.set(title=title, xlabel="draft", ylim=(0, 1))
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accepted, of those reached")
    figure.axes[0].legend(fontsize="small")
    return figure


def candidates(results):
    """Accepted length against the number of candidates, and on the second axis what the head takes for one block."""
    figure = Figure(figsize=(5 * len(results_lib.SWEPT), 4), layout="constrained")
    counts = results_lib.COUNTS
    for panel, name in zip(figure.subplots(1, len(results_lib.SWEPT), sharey=True), results_lib.SWEPT):
        times = panel.twinx()
        for way, color, label in (("lattice", "C0", "best of the base logits"), ("union", "C1", "half of them successors")):
            some = [M for M in counts if way == "lattice" or M > 1]
            lengths = [results.length("greedy", name, f"{way} {M}") for M in some]
            if None not in lengths:
                middle, low, high = np.transpose(lengths)
                panel.plot(some, middle, marker="o", markersize=4, color=color, label=label)
                panel.fill_between(some, low, high, color=color, alpha=0.12)
            taken = [results.milliseconds(name, f"{way} {M}") for M in some]
            if None not in taken:
                times.plot(some, taken, color=color, linestyle=":")
        whole, taken = results.length("greedy", name, "sequential"), results.milliseconds(name, "sequential")
        if whole:
            panel.axhline(whole[0], color="0.4", linewidth=1, label="sequential, all tokens")
        if taken:
            times.axhline(taken, color="0.4", linewidth=1, linestyle=":")
        times.set_ylim(bottom=0)
        times.set_ylabel("head, ms a block (dotted)")
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, counts)
        panel.set(title=results_lib.TITLES[name], xlabel="candidates")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("accepted length, temperature 0")
    figure.axes[0].legend(fontsize="small")
    return figure


def learning(results, curve):
    """Accepted length of the common backbone against the positions it was trained on, and what the six have after it."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    known = [(positions, length) for positions, length in curve if length]
    if known:
        positions, lengths = zip(*known)
        middle, low, high = np.transpose(lengths)
        panel.plot(positions, middle, marker="o", color="C0", label="common backbone (DFlash)")
        panel.fill_between(positions, low, high, color="C0", alpha=0.15)
        config = six.get_config("vanilla")
        end = positions[-1] + config.steps * config.batch.sequences * config.batch.anchors * config.drafter.block_length
        for i, name in enumerate(six.SIX):
            length = results.length("greedy", name, results_lib.NATIVE[name])
            if length:
                panel.plot([end], length[:1], marker="s", color=f"C{i}", linestyle="", label=f"{results_lib.TITLES[name]}, after it")
    panel.set(xlabel="positions trained", ylabel="accepted length, temperature 0")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    return figure
