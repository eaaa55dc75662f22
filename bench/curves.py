"""The accuracy benchmark's table and plot."""

import math
from statistics import mean, median
from typing import Any

OURS, PLAIN, TUTORIAL, CONVNET = "vitrail", "vitrail, plain ViT", "tutorial", "resnet-9"
COLOURS = {OURS: "black", "timm": "C0", "transformers": "C1", "vit-pytorch": "C2", TUTORIAL: "C4"}
COLOURS |= {PLAIN: "grey", CONVNET: "C3"}

Entry = dict[str, Any]


def accuracy_table(result: dict[str, Any]) -> str:
    return "\n\n".join(
        [set_table(name, entries, result["minutes"]) for name, entries in result["sets"].items()]
        + [accuracy_legend(result)]
    )


def set_table(name: str, entries: list[Entry], minutes: float) -> str:
    rows = group_entries(entries, minutes)
    best, tutorial = best_peer(rows), rows[f"{TUTORIAL}, published"][0]
    level = min(entry["val"] for entry in rows[OURS])  # which all our seeds reach
    our_seconds = median(seconds_to(entry["curve"], level) for entry in rows[OURS])
    lines = [
        f"| {name}, {minutes:g} min | parameters | learning rate | test accuracy | "
        f"seconds to the best peer's {best['val']:.1%} | "
        f"seconds to the tutorial's {tutorial['val']:.1%} | "
        f"times our seconds to our {level:.1%} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for label, group in rows.items():
        cells = [f"{group[0]['parameters']:,}", f"{group[0]['lr']:g}", format_accuracy(group)]
        cells += [format_seconds_to(group, peer["val"]) for peer in (best, tutorial)]
        cells.append(format_times_longer(group, level, our_seconds))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def group_entries(entries: list[Entry], minutes: float) -> dict[str, list[Entry]]:
    """The rows: Vitrail with all seeds, Vitrail in less time, each peer as published and tuned."""
    ours = [entry for entry in entries if entry["contender"] == OURS]
    rows = {OURS: [entry for entry in ours if entry["minutes"] == minutes]}
    for entry in ours:
        if entry["minutes"] != minutes:
            rows[f"{OURS} in {entry['minutes']:g} min"] = [entry]
    if plain := [entry for entry in entries if entry["contender"] == PLAIN]:
        rows[PLAIN] = plain
    peers = dict.fromkeys(e["contender"] for e in entries if not e["contender"].startswith(OURS))
    for peer in peers:
        if peer == CONVNET:
            rows[peer] = [entry for entry in entries if entry["contender"] == peer]
            continue
        runs = [entry for entry in entries if entry["contender"] == peer]
        rows[f"{peer}, published"] = [entry for entry in runs if entry["published"]]
        rows[f"{peer}, best learning rate"] = [max(runs, key=lambda entry: entry["val"] or 0)]
    return rows


def best_peer(rows: dict[str, list[Entry]]) -> Entry:
    """The ViT peer with the highest validation accuracy."""
    peers = [group[0] for label, group in rows.items() if not label.startswith((OURS, CONVNET))]
    return max(peers, key=lambda entry: entry["val"] or 0)


def format_accuracy(group: list[Entry]) -> str:
    """The test accuracy; of several seeds, the mean and the range."""
    accuracies = [entry["test"] for entry in group]
    if None in accuracies:
        return "diverged"
    if len(accuracies) == 1:
        return f"{accuracies[0]:.1%}"
    low, high = min(accuracies), max(accuracies)
    return f"{mean(accuracies):.1%} ({low:.1%} to {high:.1%}, {len(accuracies)} seeds)"


def format_seconds_to(group: list[Entry], level: float) -> str:
    seconds = median(seconds_to(entry["curve"], level) for entry in group)
    return f"{seconds:.0f}" if seconds < math.inf else "not reached"


def format_times_longer(group: list[Entry], level: float, our_seconds: float) -> str:
    """Time to accuracy over ours; if the group does not reach the level, more than all its time."""
    seconds = median(seconds_to(entry["curve"], level) for entry in group)
    if seconds < math.inf:
        return f"{seconds / our_seconds:.2f}"
    longest = max((entry["curve"][-1][0] for entry in group if entry["curve"]), default=0.0)
    return f"over {longest / our_seconds:.2f}"


def seconds_to(curve: list[list[float]], level: float) -> float:
    """Seconds until the curve first reaches `level`, interpolated between two evaluations."""
    before = None
    for seconds, accuracy in curve:
        if accuracy >= level:
            if before is None:
                return seconds
            fraction = (level - before[1]) / (accuracy - before[1])
            return float(before[0] + fraction * (seconds - before[0]))
        before = seconds, accuracy
    return math.inf


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
        "The last columns are the seconds of training until the validation accuracy reaches the "
        "final one of the best ViT peer, and of the tutorial as published, and how many times the "
        "seconds of `vitrail` it takes to the lowest final accuracy of its seeds; interpolated "
        "between two evaluations. `vitrail` is `vitrail train SET --minutes M --from none`, the "
        "plain ViT the same with `--model Nano/4`; their minutes include start, "
        "planning and test; the peers train for all the minutes with Vitrail's loader, and their "
        "clock stops during evaluation. Best learning rate: of 0.0003, 0.001, 0.003 and the "
        "published one, chosen by validation accuracy. "
        f"Recipes, compressed to the minutes: {recipes}."
    )


def plot_accuracy(result: dict[str, Any]) -> Any:
    """One panel per data set: validation accuracy over seconds of training."""
    from matplotlib import pyplot

    sets = result["sets"]
    figure, grid = pyplot.subplots(
        1, len(sets), figsize=(5.5 * len(sets), 4.2), layout="constrained", squeeze=False
    )
    for axes, (name, entries) in zip(grid[0], sets.items(), strict=True):
        for label, group in group_entries(entries, result["minutes"]).items():
            plot_group(axes, label, group)
        axes.set_title(name)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("validation accuracy")
        axes.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


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
