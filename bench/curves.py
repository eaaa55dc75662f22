"""The accuracy benchmark's table and plot."""

from statistics import mean
from typing import Any

OURS, PLAIN, CONVNET = "vitrail", "vitrail, plain ViT", "resnet-9"
BEST = "best learning rate"
COLOURS = {OURS: "black", "timm": "C0", "transformers": "C1", "vit-pytorch": "C2", "tutorial": "C4"}
COLOURS |= {PLAIN: "grey", CONVNET: "C3"}

Entry = dict[str, Any]


def accuracy_table(result: dict[str, Any]) -> str:
    return "\n\n".join(
        [set_table(name, entries, result["minutes"]) for name, entries in result["sets"].items()]
        + [accuracy_legend(result)]
    )


def set_table(name: str, entries: list[Entry], minutes: float) -> str:
    """One row per contender, then how many times our minutes the others need, in two sentences."""
    rows = group_entries(entries, minutes)
    level = mean_accuracy(rows[OURS])
    lines = [
        f"| {name}, {minutes:g} min | parameters | precision | learning rate | test accuracy | "
        f"times our minutes to our {level:.1%} |",
        f"|---|{'---:|' * 5}",
    ]
    for label, group in rows.items():
        first = group[0]
        cells = [f"{first['parameters']:,}", first.get("precision", "unknown")]
        cells += [f"{first['lr']:g}", format_accuracy(group)]
        usual = first["minutes"] == minutes
        cells.append(times_to(other_times(entries, first), level, minutes) if usual else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", summarise_set(entries, rows, minutes)])


def summarise_set(entries: list[Entry], rows: dict[str, list[Entry]], minutes: float) -> str:
    """The time of the ConvNet and the best ViT peer to our accuracy, and ours to the latter's."""
    level, clauses, ours = mean_accuracy(rows[OURS]), [], ""
    if best := best_peer(rows):
        times = times_to(other_times(entries, best), level, minutes)
        clauses.append(f"the best ViT peer ({best['contender']}) needs {times} times the minutes")
        times = times_to(other_times(entries, rows[OURS][0]), best["test"], minutes)
        ours = f" For the {best['test']:.1%} of the best ViT peer, `vitrail` needs {times} times."
    if CONVNET in rows:
        times = times_to(other_times(entries, rows[CONVNET][0]), level, minutes)
        clauses.append(f"the ConvNet needs {times} times the minutes")
    needed = ", and ".join(clauses) or "nobody else ran"
    return f"For the {level:.1%} of `vitrail` in {minutes:g} minutes, {needed}.{ours}"


def other_times(entries: list[Entry], entry: Entry) -> list[Entry]:
    """The runs of a contender for any time; of a peer, only with the same learning rate."""
    runs = [other for other in entries if other["contender"] == entry["contender"]]
    chosen = entry["contender"] in (OURS, PLAIN)  # which choose another rate for another time
    return [other for other in runs if chosen or other["lr"] == entry["lr"]]


def times_to(runs: list[Entry], level: float, minutes: float) -> str:
    """The multiple of `minutes` with which training ends at `level`.

    Interpolated over the logarithm of the minutes, between the final accuracies of whole runs: a
    curve within a run rises late, when the learning rate falls.
    """
    before = None
    for time, accuracy in final_accuracies(runs):
        if accuracy >= level:
            if before is None:
                return f"at most {time / minutes:g}"
            fraction = (level - before[1]) / (accuracy - before[1])
            return f"{before[0] * (time / before[0]) ** fraction / minutes:.2f}"
        before = time, accuracy
    assert before is not None
    return f"over {before[0] / minutes:g}"


def final_accuracies(runs: list[Entry]) -> list[tuple[float, float]]:
    """Minutes and mean test accuracy, from short to long."""
    times = sorted({entry["minutes"] for entry in runs})
    return [(time, mean_accuracy([e for e in runs if e["minutes"] == time])) for time in times]


def mean_accuracy(group: list[Entry]) -> float:
    """On test images; 0 for a training that diverged."""
    return mean(entry["test"] or 0.0 for entry in group)


def group_entries(entries: list[Entry], minutes: float) -> dict[str, list[Entry]]:
    """The rows: Vitrail with all seeds, each peer as published and tuned; then other minutes."""
    rows = {}
    for contender in dict.fromkeys(entry["contender"] for entry in entries):
        runs = [entry for entry in entries if entry["contender"] == contender]
        usual = [entry for entry in runs if entry["minutes"] == minutes]
        if contender in (OURS, PLAIN, CONVNET):
            rows[contender] = usual
        else:
            rows |= {f"{contender}, published": [entry] for entry in usual if entry["published"]}
            rows[f"{contender}, {BEST}"] = [max(usual, key=lambda e: e["val"] or 0)]
        others = sorted({entry["minutes"] for entry in runs} - {minutes})
        rows |= {
            f"{contender} in {m:g} min": [e for e in runs if e["minutes"] == m] for m in others
        }
    return rows


def best_peer(rows: dict[str, list[Entry]]) -> Entry | None:
    """The ViT peer with the highest validation accuracy in the usual minutes."""
    tuned = [group[0] for label, group in rows.items() if label.endswith(BEST)]
    return max((entry for entry in tuned if entry["val"]), key=lambda e: e["val"], default=None)


def format_accuracy(group: list[Entry]) -> str:
    """The test accuracy; of several seeds, the mean and the range."""
    accuracies = [entry["test"] for entry in group]
    if None in accuracies:
        return "diverged"
    if len(accuracies) == 1:
        return f"{accuracies[0]:.1%}"
    low, high = min(accuracies), max(accuracies)
    return f"{mean(accuracies):.1%} ({low:.1%} to {high:.1%}, {len(accuracies)} seeds)"


def accuracy_legend(result: dict[str, Any]) -> str:
    origins = {
        entry["contender"]: entry["origin"]
        for entries in result["sets"].values()
        for entry in entries
        if not entry["contender"].startswith(OURS)
    }
    recipes = "; ".join(f"{peer}: {origin}" for peer, origin in origins.items())
    jobs, threads = result["jobs"], result["threads"]
    order = "one entry at a time" if jobs == 1 else f"{jobs} entries at a time"
    each = "one thread" if threads == 1 else f"{threads} threads"
    return (
        f"Every entry uses {each}; {order}. "
        "Times to an accuracy are multiples of the minutes, interpolated over their logarithm "
        "between runs that end there, so that their learning rates have fallen; `over` and `at "
        "most` are the longest and shortest time that was trained. `vitrail` is "
        "`vitrail train SET --minutes M --from none`, the plain ViT the same with "
        "`--model Nano/4`; their minutes include start, planning and test. The peers train for all "
        "the minutes with Vitrail's loader, and their clock stops during evaluation. Best learning "
        "rate: the best on validation data of those that were tried. Precision is that of training "
        "(bfloat16 and float32: of the convolutions and of the blocks); all are evaluated in "
        "float32. "
        f"Recipes, compressed to the minutes: {recipes}."
    )


def plot_accuracy(result: dict[str, Any]) -> Any:
    """For each data set, accuracy during the runs, and at the end of shorter and longer ones."""
    from matplotlib import pyplot

    sets = result["sets"]
    size = 5.5 * len(sets), 7.6
    figure, grid = pyplot.subplots(2, len(sets), figsize=size, layout="constrained", squeeze=False)
    for (during, final), (name, entries) in zip(grid.T, sets.items(), strict=True):
        for label, group in group_entries(entries, result["minutes"]).items():
            plot_group(during, label, group)
        for contender in dict.fromkeys(entry["contender"] for entry in entries):
            plot_final(final, contender, entries, result["minutes"])
        during.set(title=name, xlabel="seconds of training", ylabel="validation accuracy")
        final.set(xscale="log", xlabel="minutes of the whole training", ylabel="test accuracy")
        times = sorted({entry["minutes"] for entry in entries})
        final.set_xticks(times, [f"{time:g}" for time in times])
        final.minorticks_off()
        during.grid(alpha=0.3)
        final.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def plot_final(axes: Any, contender: str, entries: list[Entry], minutes: float) -> None:
    """Final accuracy over the minutes of training; of a peer, with its best learning rate."""
    runs = [entry for entry in entries if entry["contender"] == contender]
    usual = [entry for entry in runs if entry["minutes"] == minutes]
    points = final_accuracies(other_times(runs, max(usual, key=lambda e: e["val"] or 0)))
    width = 2 if contender == OURS else 1.2
    axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[contender], linewidth=width)


def plot_group(axes: Any, label: str, group: list[Entry]) -> None:
    contender = group[0]["contender"]
    style = ":" if label.endswith(" min") else "--" if label.endswith("published") else "-"
    for number, entry in enumerate(group):
        if entry["curve"]:
            axes.plot(
                *zip(*entry["curve"], strict=True),
                style,
                color=COLOURS[contender],
                linewidth=2 if contender == OURS else 1.2,
                marker="." if contender == OURS else None,
                label=None if number else label,
            )
