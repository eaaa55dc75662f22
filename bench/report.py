"""Results on paper: what was measured on which machine, as JSON, a table and a plot."""

import io
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIMIT = "limit"  # the contender that is no peer
PACKAGES = ("torch", "timm", "transformers", "vit-pytorch", "torchvision", "vitrail")

LEGEND = (
    "Milliseconds, median of interleaved rounds. In brackets: that time over ours, round by round, "
    "± half the distance of its quartiles; above 1 it is slower than we are. "
    "`limit`: the same matrix products alone."
)


def surroundings(threads: int) -> dict[str, Any]:
    """The machine without its name, the versions, the commit."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    return {
        "machine": {"cpu": cpu, "threads": threads, "system": platform.system()},
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        "commit": git("rev-parse", "--short", "HEAD")
        + ("+" if git("status", "--porcelain", "vitrail", "bench/*.py") else ""),
    }


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def table(result: dict[str, Any]) -> str:
    """The Markdown that stands in README."""
    contenders = list(result["cases"][0]["rows"])
    lines = [header(result["name"], contenders)]
    for case in result["cases"]:
        cells = [cell(row, name) for name, row in case["rows"].items()]
        lines.append(f"| {case['label']} | {' | '.join(cells)} |")
    peers = [name for name in contenders if name != LIMIT]
    lines += ["", LEGEND, "", header("alone in a fresh process", peers)]
    for case in result["alone"]:
        cells = [f"{case['rows'][peer]['megabytes']:.1f} MB" for peer in peers]
        lines.append(f"| peak memory, {case['label']} | {' | '.join(cells)} |")
    cells = [f"{result['alone'][0]['rows'][peer]['seconds']:.1f} s" for peer in peers]
    lines.append(f"| start to first answer, {result['alone'][0]['label']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", footer(result), "", noise(result), ""])


def header(title: str, columns: list[str]) -> str:
    return f"| {title} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"


def cell(row: dict[str, Any], name: str) -> str:
    milliseconds = row["median"] * 1e3
    time = f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"
    if name == "vitrail":
        return time
    return f"{time} ({row['ratio']:.2f} ± {row['spread'] / 2:.2f})"


def footer(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{machine['cpu']}, {machine['threads']} threads; {used}; commit {result['commit']}."


def noise(result: dict[str, Any]) -> str:
    """Which numbers not to believe."""
    loose = [
        f"{name} in {case['label']} ({row['halves'][0]:.2f} and {row['halves'][1]:.2f})"
        for case in result["cases"]
        for name, row in case["rows"].items()
        if not row["steady"]
    ]
    if not loose:
        return "Both halves of every run agree within its spread."
    return f"The machine was too noisy: the halves of a run disagree for {', '.join(loose)}."


def plot(result: dict[str, Any]) -> str:
    """Bars of every contender's time over ours, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vitrail"  # the same numbers give the same file
    from matplotlib import pyplot

    cases = result["cases"]
    names = [name for name in cases[0]["rows"] if name != "vitrail"]
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.8 * len(cases)), layout="constrained")
    high = 0.8 / len(names)
    for i, name in enumerate(names):
        rows = [case["rows"][name] for case in cases]
        axes.barh(
            [j + (i - len(names) / 2 + 0.5) * high for j in range(len(cases))],
            [row["ratio"] for row in rows],
            high,
            xerr=[row["spread"] / 2 for row in rows],
            error_kw={"elinewidth": 0.8},
            color="lightgrey" if name == LIMIT else f"C{i}",
            label=name,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), [case["label"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlabel(f"{result['name']}: time over vitrail's (right of the line: slower)")
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()
