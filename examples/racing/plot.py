"""The picture: for each layout, time and memory of everyone."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Row

COLORS = {"ours": "tab:orange", "limit": "tab:gray", "torch": "tab:blue", "jax": "tab:green"}


def draw(rows: Sequence[Row], path: str) -> None:
    """Write the picture; its format follows from the name of the file. Needs matplotlib."""
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["layout"]), []).append(row)
    heights = [len(group) + 2 for group in groups.values()]
    figure = Figure(figsize=(11, 0.28 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (time, memory), ((model, layout), group) in zip(axes, groups.items(), strict=True):
        names = [row["who"] for row in group]
        colors = [COLORS[name.split()[0]] for name in names]
        time.barh(names, [row["ms"] for row in group], xerr=[row["spread"] / 2 for row in group], color=colors)
        memory.barh(names, [row["rss_mb"] for row in group], color=colors)
        time.set_title(f"{model}, {layout}", loc="left")
        time.set_xlim(left=0)
        time.set_xlabel("ms a step")
        memory.set_xlabel("peak MB a rank")
        memory.set_yticks([])
        for each in (time, memory):
            each.invert_yaxis()
    figure.savefig(path)
