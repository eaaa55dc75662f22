"""Results on paper: what was measured on which machine, as JSON, a table and a plot.

    python -m bench.report [NAME ...]

makes table and plot of each JSON in bench/results again, and prints the tables for README.
"""

import io
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench import curves, runtime
from bench.alone import ROOT
from bench.limit import LIMIT
from vitrail.errors import UserError
from vitrail.files import write_file

RESULTS = ROOT / "bench" / "results"
PACKAGES = (
    "torch",
    "timm",
    "transformers",
    "vit-pytorch",
    "torchvision",
    "onnxruntime",
    "scikit-learn",
    "pillow",
    "simplejpeg",
    "vitrail",
)
SCALES = {"ms": 1e3, "s": 1.0, "MB": 1.0, "x": 1.0}
WORDS = {"ms": "milliseconds", "s": "seconds", "MB": "megabytes", "x": "times the file's size"}

RATIO = (
    "In brackets: {what} over ours, round by round, ± half the distance of its quartiles; "
    "above 1 {worse}."
)


def surroundings(threads: int) -> dict[str, Any]:
    """The machine without its name, the versions, the commit."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    machine = {"cpu": cpu, "threads": threads, "system": platform.system()}
    return {"machine": machine, **origin()}


def origin() -> dict[str, Any]:
    """What was measured: ask before it is, for the files may change meanwhile."""
    return {"versions": versions(), "commit": commit()}


def versions() -> dict[str, str]:
    """Of Python, and of all the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # a bench without peers needs none
    return found


def commit() -> str:
    """With a + if the code is not quite that of the commit."""
    try:
        changed = git("status", "--porcelain", "vitrail", "bench/*.py")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def keep(result: dict[str, Any], folder: Path) -> str:
    """Writes JSON, table and plot of a result, and gives the table."""
    page = table(result)
    name = result["name"]
    write_file(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_file(folder / f"{name}.md", page)
    write_file(folder / f"{name}.svg", plot(result))
    return page


def table(result: dict[str, Any]) -> str:
    """The Markdown that stands in README."""
    if "sets" in result:
        return "\n".join([curves.table(result), "", footer(result), ""])
    contenders = list(dict.fromkeys(name for case in result["cases"] for name in case["rows"]))
    lines = [header(result["name"], contenders)]
    for case in result["cases"]:
        cells = [
            cell(case, name, case["rows"][name]) if name in case["rows"] else ""
            for name in contenders
        ]
        lines.append(f"| {case['label']} | {' | '.join(cells)} |")
    lines += ["", legend(result, contenders)]
    for where in result.get("where", []):
        lines += ["", shares_table(where)]
    return "\n".join([*lines, "", footer(result), "", noise(result), ""])


def header(title: str, columns: list[str]) -> str:
    return f"| {title} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"


def cell(case: dict[str, Any], name: str, row: dict[str, Any]) -> str:
    if case["unit"] == "images/s":
        shown = number(case["images"] / row["median"])
    else:
        shown = number(row["median"] * SCALES[case["unit"]])
    if name == "vitrail":
        return shown
    return f"{shown} ({row['ratio']:.2f} ± {row['spread'] / 2:.2f})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def legend(result: dict[str, Any], contenders: list[str]) -> str:
    units = list(dict.fromkeys(case["unit"] for case in result["cases"]))
    told = " or ".join(WORDS.get(unit, "images per second") for unit in units)
    what, worse = ("their time", "they are slower than we are")
    if units == ["MB"]:
        what, worse = ("their memory", "they need more than we do")
    words = [f"{told[0].upper()}{told[1:]}, medians of two interleaved repeats."]
    words.append(RATIO.format(what=what, worse=worse))
    if LIMIT in contenders:
        words.append("`limit`: the same matrix products alone.")
    if runtime.NAME in contenders:
        words.append("`onnxruntime`: our model exported, as a runtime; the others are eager torch.")
    return " ".join([*words, result["note"]] if "note" in result else words)


def shares_table(where: dict[str, Any]) -> str:
    """Where the time of a step goes."""
    peers = list(where["rows"])
    lines = [header(f"where a step's time goes: {where['label']}", peers)]
    for group in where["rows"][peers[0]]:
        cells = [f"{where['rows'][peer][group]:.1%}" for peer in peers]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    lines += [
        "",
        "`attention` is fused, or its softmax; spelled out, its products are matrix products.",
    ]
    return "\n".join(lines)


def footer(result: dict[str, Any]) -> str:
    """The machine, and what was measured; entries of an accuracy may be of several days."""
    machine = result["machine"]
    entries = [entry for group in result.get("sets", {}).values() for entry in group] or [result]
    used = [entry["versions"] for entry in entries if "versions" in entry] or [result["versions"]]
    told = (", ".join(f"{name} {number}" for name, number in one.items()) for one in used)
    commits = list(dict.fromkeys(entry.get("commit", "unknown") for entry in entries))
    return (
        f"{machine['cpu']}, {machine['threads']} threads; {' or '.join(dict.fromkeys(told))}; "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
    )


def noise(result: dict[str, Any]) -> str:
    """Which numbers not to believe."""
    loose = [
        f"{name} in {case['label']} ({' and '.join(f'{r:.2f}' for r in row['repeats'])})"
        for case in result["cases"]
        for name, row in case["rows"].items()
        if not row["steady"]
    ]
    if not loose:
        return "Both repeats agree within the spread."
    return f"The machine was too noisy: the two repeats disagree for {', '.join(loose)}."


def plot(result: dict[str, Any]) -> str:
    """Bars of every contender's number over ours, as SVG; or the curves of an accuracy."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vitrail"  # the same numbers give the same file
    from matplotlib import pyplot

    figure = curves.plot(result) if "sets" in result else bars(result)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()


def bars(result: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    cases = result["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["rows"]))
    names.remove("vitrail")
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.8 * len(cases)), layout="constrained")
    high = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        placed = [(j, case["rows"][name]) for j, case in enumerate(cases) if name in case["rows"]]
        axes.barh(
            [j + (i - len(names) / 2 + 0.5) * high for j, _ in placed],
            [row["ratio"] for _, row in placed],
            high,
            xerr=[row["spread"] / 2 for _, row in placed],
            error_kw={"elinewidth": 0.8},
            color="lightgrey" if name == LIMIT else f"C{i}",
            hatch="//" if name == runtime.NAME else None,
            label=name,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), [case["label"] for case in cases])
    axes.invert_yaxis()
    what, more = "time", "slower"
    if {case["unit"] for case in cases} == {"MB"}:
        what, more = "memory", "more"
    axes.set_xlabel(
        f"{result['name']}: the peer's {what} over vitrail's (right of the line: {more})"
    )
    figure.legend(loc="outside upper center", ncols=max(1, len(names)), frameon=False)
    return figure


def main(names: list[str]) -> None:
    for path in [RESULTS / f"{name}.json" for name in names] or sorted(RESULTS.glob("*.json")):
        if not path.is_file():
            raise UserError(f"there is no {path.name}; make it with python -m bench {path.stem}")
        print(keep(json.loads(path.read_text()), RESULTS))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
