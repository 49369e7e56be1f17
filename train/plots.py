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
