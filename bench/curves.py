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
    """One row per contender, then how many times longer the best ViT peer and the ConvNet need."""
    rows = group_entries(entries, minutes)
    level, our_seconds = our_level(rows)
    peers = {
        "best peer": best_peer(rows),
        "tutorial": rows.get(f"{TUTORIAL}, published", [None])[0],
    }
    levels = {f"{label}'s": peer["val"] for label, peer in peers.items() if peer and peer["val"]}
    columns = [f"seconds to the {label} {value:.1%}" for label, value in levels.items()]
    columns.append(f"times our seconds to our {level:.1%}")
    lines = [
        f"| {name}, {minutes:g} min | parameters | learning rate | test accuracy | "
        f"{' | '.join(columns)} |",
        f"|---|{'---:|' * (3 + len(columns))}",
    ]
    for label, group in rows.items():
        cells = [f"{group[0]['parameters']:,}", f"{group[0]['lr']:g}", format_accuracy(group)]
        cells += [format_seconds_to(group, value) for value in levels.values()]
        cells.append(format_times_longer(group, level, our_seconds))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", summarise_set(entries, rows, minutes)])


def summarise_set(entries: list[Entry], rows: dict[str, list[Entry]], minutes: float) -> str:
    """How many times as long as Vitrail the best ViT peer and the ConvNet need, in one sentence."""
    level, our_seconds = our_level(rows)
    best, clauses = best_peer(rows), []
    others = [(best["contender"], f"the best ViT peer ({best['contender']})")] if best else []
    others.append((CONVNET, "the ConvNet"))
    for contender, label in others:
        if group := [entry for entry in entries if entry["contender"] == contender]:
            clauses.append(f"{label} {describe_times(group, level, our_seconds)}")
    needed = ", and ".join(clauses)
    return (
        f"For the {level:.1%} of `vitrail` in {minutes:g} minutes, {needed or 'nobody else ran'}."
    )


def describe_times(group: list[Entry], level: float, our_seconds: float) -> str:
    """Whichever run of the contender reaches the level first; or the longest that does not."""
    seconds = min(total_seconds(entry, level) for entry in group)
    if seconds < math.inf:
        return f"needs {seconds / our_seconds:.2f} times the time"
    longest = max(group, key=lambda entry: entry["minutes"])
    accuracy = max(entry["val"] or 0.0 for entry in group if entry["minutes"] == longest["minutes"])
    times = 60 * longest["minutes"] / our_seconds
    return f"needs over {times:.2f} times the time, with which it reaches {accuracy:.1%}"


def our_level(rows: dict[str, list[Entry]]) -> tuple[float, float]:
    """The validation accuracy that all our seeds reach, and the median of their seconds to it."""
    level = min(entry["val"] for entry in rows[OURS])
    return level, median(total_seconds(entry, level) for entry in rows[OURS])


def group_entries(entries: list[Entry], minutes: float) -> dict[str, list[Entry]]:
    """The rows: Vitrail with all seeds, each peer as published and tuned; then other minutes."""
    rows = {}
    for contender in dict.fromkeys(entry["contender"] for entry in entries):
        runs = [entry for entry in entries if entry["contender"] == contender]
        usual = [entry for entry in runs if entry["minutes"] == minutes]
        if contender in (OURS, PLAIN, CONVNET):
            rows[contender] = usual
        else:
            rows[f"{contender}, published"] = [entry for entry in usual if entry["published"]]
            rows[f"{contender}, best learning rate"] = [max(usual, key=lambda e: e["val"] or 0)]
        others = [entry for entry in runs if entry["minutes"] != minutes]
        rows |= {f"{contender} in {entry['minutes']:g} min": [entry] for entry in others}
    return rows


def best_peer(rows: dict[str, list[Entry]]) -> Entry | None:
    """The ViT peer with the highest validation accuracy in the usual minutes."""
    tuned = [group[0] for label, group in rows.items() if label.endswith("best learning rate")]
    return max(tuned, key=lambda entry: entry["val"] or 0, default=None)


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
    seconds = median(total_seconds(entry, level) for entry in group)
    return f"{seconds:.0f}" if seconds < math.inf else "not reached"


def format_times_longer(group: list[Entry], level: float, our_seconds: float) -> str:
    """Time to accuracy over ours; if the group does not reach the level, more than all its time."""
    seconds = median(total_seconds(entry, level) for entry in group)
    if seconds < math.inf:
        return f"{seconds / our_seconds:.2f}"
    return f"over {60 * group[0]['minutes'] / our_seconds:.2f}"


def total_seconds(entry: Entry, level: float) -> float:
    """Seconds until a contender reaches `level`; of Vitrail, with start, planning and test."""
    seconds = seconds_to(entry["curve"], level)
    if entry["contender"].startswith(OURS) and entry["curve"]:
        seconds += max(0.0, 60 * entry["minutes"] - entry["curve"][-1][0])
    return seconds


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
        "The last columns are the seconds until the validation accuracy reaches the final one of "
        "the best ViT peer, and of the tutorial as published, and how many times the seconds of "
        "`vitrail` it takes to the lowest final accuracy of its seeds; interpolated between two "
        "evaluations. `vitrail` is `vitrail train SET --minutes M --from none`, the plain ViT the "
        "same with `--model Nano/4`; their seconds include start, planning and test. The peers "
        "train for all the minutes with Vitrail's loader, and their clock stops during evaluation. "
        "Best learning rate: of 0.0003, 0.001, 0.003 and the published one, chosen by validation "
        "accuracy. "
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
