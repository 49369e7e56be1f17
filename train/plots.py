"""The figures of train.calibrate and train.simulate. Drawing needs matplotlib, which is an extra of this package."""

import importlib.util

import numpy as np

_COLUMNS = 3


def check() -> None:
    """Raises ValueError where there is no matplotlib: to be called before anything takes long."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: matplotlib is not installed; allowed: pip install -e '.[plots]', or --noplot")


def reliability_diagram(path, before: list[dict], after: list[dict]) -> None:
    """One panel a position: predicted against observed survival, before and after calibration, and how many rounds each
    bin has after it. Both are from `calibration.by_position`; the format is that of the path's suffix."""
    figure, panels = _panels(len(after))
    for t, (panel, old, new) in enumerate(zip(panels, before, after)):
        counts, rows = panel.twinx(), new["reliability"]
        counts.bar(rows.lower, rows.count, width=rows.upper - rows.lower, align="edge", color="0.85", zorder=0)
        counts.set_ylabel("rounds", color="0.5")
        counts.tick_params(axis="y", colors="0.5")
        panel.set_zorder(counts.get_zorder() + 1)  # the lines lie over the bars
        panel.patch.set_visible(False)
        panel.plot([0, 1], [0, 1], color="0.6", linestyle=":")
        for label, values, style in (("before", old, "o--"), ("after", new, "o-")):
            some = values["reliability"].count > 0
            panel.plot(values["reliability"].predicted[some], values["reliability"].observed[some], style, markersize=3,
                       label=f"{label}: ECE {100 * values['ece']:.1f} %")
        panel.set(title=f"draft {t + 1}", xlabel="predicted survival", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
        panel.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=120)


def load_diagram(path, curves: dict[str, list[dict]], capacity: str) -> None:
    """Tokens/s against concurrency, against tokens/s of one user, and verification length against concurrency: one line a
    policy, from `Outcome.as_dict` of rising load. capacity: says where the capacity curve is from."""
    figure, panels = _panels(3)
    axes = (("concurrency", "tokens_per_second"), ("tokens_per_second_per_user", "tokens_per_second"),
            ("concurrency", "verification_length"))
    names = {"concurrency": "requests decoded together", "tokens_per_second": "tokens/s, all requests",
             "tokens_per_second_per_user": "tokens/s of one request", "verification_length": "tokens verified a round"}
    fixed = [name for name in curves if name.startswith("static")]
    for panel, (x, y) in zip(panels, axes):
        for name, outcomes in curves.items():
            width = {"causal": 4, "lagged": 2}.get(name)  # they may lie on each other
            style = {"linewidth": width} if width else {"linewidth": 1, "linestyle": "--"}
            if name in fixed:
                style["color"] = str(0.8 - 0.6 * fixed.index(name) / len(fixed))
            panel.plot([o[x] for o in outcomes], [o[y] for o in outcomes], marker=".", label=name, **style)
        panel.set(xlabel=names[x], ylabel=names[y])
        panel.grid(alpha=0.3)
        if x == "concurrency":
            panel.set_xscale("log", base=2)
    panels[0].legend(fontsize="small")
    figure.suptitle(f"capacity: {capacity}", fontsize="medium")
    figure.savefig(path, dpi=120)


def _panels(count):
    from matplotlib.figure import Figure

    rows = -(-count // _COLUMNS)
    columns = min(count, _COLUMNS)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def lattice_diagram(path, anchor: str, candidates, probabilities, transitions, slots, accepted: int, said, title="") -> None:
    """One block as its lattice: a column for each draft position, its candidates from the best base logit downwards.

    anchor: the anchor's text. candidates: [T][K] texts. probabilities [T, K]: of each candidate behind the walked
    predecessor. transitions [T - 1, K, K]: the law of each candidate's successors, drawn as lines. slots int [T]: the walked
    path. accepted: how many of its drafts verification took. said: [T] texts, the target's own tokens. K of the M
    candidates are drawn, all that ``slots`` names among them.
    """
    from matplotlib.figure import Figure

    T, K = len(candidates), len(candidates[0])
    figure = Figure(figsize=(1.9 * T + 2, 0.42 * K + 1.8), layout="constrained")
    panel = figure.subplots()
    place = lambda t, k: (t + 1, -k)
    walk = [(0, -(K - 1) / 2), *(place(t, k) for t, k in enumerate(slots))]
    taken = lambda t: "C2" if t < accepted else "C3"
    for t in range(T - 1):
        for a in range(K):
            for b in range(K):
                if (share := float(transitions[t][a][b])) > 0.02:
                    panel.plot(*zip(place(t, a), place(t + 1, b)), color="0.4", linewidth=2.5 * share, alpha=0.15 + 0.5 * share,
                               zorder=1)
    for t in range(T):
        panel.plot(*zip(walk[t], walk[t + 1]), color=taken(t), linewidth=2.5, zorder=2)
    box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "linewidth": 0.8}
    panel.text(*walk[0], _shown(anchor), ha="center", va="center", fontsize=8, bbox=box | {"edgecolor": "black"}, zorder=3)
    for t, (texts, shares) in enumerate(zip(candidates, probabilities)):
        for k, (text, share) in enumerate(zip(texts, shares)):
            edge = taken(t) if k == slots[t] else "0.75"
            panel.text(*place(t, k), f"{_shown(text)}  {float(share):.2f}", ha="center", va="center", fontsize=7, zorder=3,
                       fontweight="bold" if text == said[t] else "normal", bbox=box | {"edgecolor": edge})
        panel.text(t + 1, -K - 0.2, _shown(said[t]), ha="center", va="center", fontsize=8, fontweight="bold")
        panel.text(t + 1, 0.9, f"draft {t + 1}", ha="center", va="center", fontsize=8, color="0.4")
    panel.text(0, 0.9, "anchor", ha="center", va="center", fontsize=8, color="0.4")
    panel.text(0, -K - 0.2, "the target says", ha="center", va="center", fontsize=8, color="0.4")
    panel.set(xlim=(-0.6, T + 0.6), ylim=(-K - 0.8, 1.4))
    panel.set_title(title, fontsize="medium")
    panel.axis("off")
    figure.savefig(path, dpi=120)


def _shown(text):
    """A token's text in a picture: blanks and line ends can be seen, and a dollar begins no formula."""
    return text.replace(" ", "\u00b7").replace("\n", "\\n").replace("$", r"\$") or "(nothing)"
