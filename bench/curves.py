"""Accuracy over time on paper: a table of the entries, and their curves."""

import math
from statistics import mean, median
from typing import Any

OURS, SEEDS = "vitrail", "seeds"
COLOURS = {OURS: "black", "timm": "C0", "transformers": "C1", "vit-pytorch": "C2", SEEDS: "C4"}

Entry = dict[str, Any]


def table(result: dict[str, Any]) -> str:
    return "\n\n".join(
        [set_table(name, entries, result["minutes"]) for name, entries in result["sets"].items()]
        + [legend(result)]
    )


def set_table(name: str, entries: list[Entry], minutes: float) -> str:
    rows = grouped(entries, minutes)
    best, seeds = best_peer(rows), rows[f"{SEEDS}, published"][0]
    lines = [
        f"| {name}, {minutes:g} min | parameters | rate | test accuracy | "
        f"seconds to the best peer's {best['val']:.1%} | to the seeds' {seeds['val']:.1%} |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for label, group in rows.items():
        cells = [f"{group[0]['parameters']:,}", f"{group[0]['lr']:g}", tested(group)]
        cells += [seconds_to(group, level["val"]) for level in (best, seeds)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def grouped(entries: list[Entry], minutes: float) -> dict[str, list[Entry]]:
    """The rows: ours with all its seeds, ours in less time, every peer as published and at best."""
    ours = [entry for entry in entries if entry["who"] == OURS]
    rows = {OURS: [entry for entry in ours if entry["minutes"] == minutes]}
    for entry in ours:
        if entry["minutes"] != minutes:
            rows[f"{OURS} in {entry['minutes']:g} min"] = [entry]
    for who in dict.fromkeys(entry["who"] for entry in entries if entry["who"] != OURS):
        tried = [entry for entry in entries if entry["who"] == who]
        rows[f"{who}, published"] = [entry for entry in tried if entry["published"]]
        rows[f"{who}, best rate"] = [max(tried, key=lambda entry: entry["val"] or 0)]
    return rows


def best_peer(rows: dict[str, list[Entry]]) -> Entry:
    """By validation accuracy at the end."""
    peers = [group[0] for label, group in rows.items() if not label.startswith(OURS)]
    return max(peers, key=lambda entry: entry["val"] or 0)


def tested(group: list[Entry]) -> str:
    rates = [entry["test"] for entry in group]
    if None in rates:
        return "diverged"
    if len(rates) == 1:
        return f"{rates[0]:.1%}"
    return f"{mean(rates):.1%} ({min(rates):.1%} to {max(rates):.1%}, {len(rates)} seeds)"


def seconds_to(group: list[Entry], level: float) -> str:
    seconds = median(reached(entry["curve"], level) for entry in group)
    return f"{seconds:.0f}" if seconds < math.inf else "not reached"


def reached(curve: list[list[float]], level: float) -> float:
    """Seconds until the curve first stands at `level`, in a line between two looks."""
    before = None
    for seconds, rate in curve:
        if rate >= level:
            if before is None:
                return seconds
            share = (level - before[1]) / (rate - before[1])
            return float(before[0] + share * (seconds - before[0]))
        before = seconds, rate
    return math.inf


def legend(result: dict[str, Any]) -> str:
    origins = {
        entry["who"]: entry["origin"]
        for entries in result["sets"].values()
        for entry in entries
        if entry["who"] != OURS
    }
    told = "; ".join(f"{who}: {origin}" for who, origin in origins.items())
    jobs, threads = result["jobs"], result["threads"]
    beside = "one entry after the other" if jobs == 1 else f"{jobs} entries at a time"
    each = "one thread" if threads == 1 else f"{threads} threads"
    return (
        f"Every entry has {each}, {beside}. "
        "Seconds of training until the validation accuracy of the best peer, and of the seeds as "
        "published, at their end; in a line between two looks. Ours is `vitrail train SET "
        "--minutes M`, whose minutes include its start, its planning and its tests; the peers have "
        "all minutes for training, our loader, and a clock that stands still at looks. "
        "Best rate: of 0.0003, 0.001, 0.003 and the published one, chosen on validation images. "
        f"Recipes, compressed to the minutes: {told}."
    )


def plot(result: dict[str, Any]) -> Any:
    """One picture for each set: validation accuracy over seconds of training."""
    from matplotlib import pyplot

    sets = result["sets"]
    figure, grid = pyplot.subplots(
        1, len(sets), figsize=(5.5 * len(sets), 4.2), layout="constrained", squeeze=False
    )
    for axes, (name, entries) in zip(grid[0], sets.items(), strict=True):
        for label, group in grouped(entries, result["minutes"]).items():
            draw(axes, label, group)
        axes.set_title(name)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("validation accuracy")
        axes.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def draw(axes: Any, label: str, group: list[Entry]) -> None:
    who = group[0]["who"]
    style = ":" if label.endswith(" min") else "--" if label.endswith("published") else "-"
    for number, entry in enumerate(group):
        if entry["curve"]:
            axes.plot(
                *zip(*entry["curve"], strict=True),
                style,
                color=COLOURS[who],
                linewidth=2 if who == OURS else 1.2,
                marker="." if who == OURS else None,
                label=None if number else label,
            )
