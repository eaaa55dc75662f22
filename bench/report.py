"""Writes results as JSON, a Markdown table and an SVG plot.

    python -m bench.report [NAME ...]

rewrites table and plot from each JSON file in bench/results, and prints the tables.
"""

import io
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench import onnx_runtime
from bench.curves import accuracy_table, plot_accuracy
from bench.finetune import render_finetune
from bench.matmuls import MATMULS
from bench.process import ROOT, report_errors
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
    "openvino",
    "scikit-learn",
    "pillow",
    "simplejpeg",
    "vitrail",
)
SCALES = {"ms": 1e3, "s": 1.0, "MB": 1.0, "x": 1.0}
UNITS = {
    "ms": "milliseconds",
    "s": "seconds",
    "MB": "megabytes",
    "x": "multiples of the file size",
    "images/s": "images per second",
}

RATIO = (
    "In parentheses: the ratio of the contender's {quantity} to Vitrail's, as the median over "
    "rounds ± half the interquartile range; above 1, {meaning}."
)


def describe_environment(threads: int) -> dict[str, Any]:
    """The machine without its host name, package versions, and the commit."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    machine = {"cpu": cpu, "threads": threads, "system": platform.system()}
    return {"machine": machine, **describe_code()}


def describe_code() -> dict[str, Any]:
    """Package versions and commit; call it before a measurement, during which files may change."""
    return {"versions": package_versions(), "commit": current_commit()}


def package_versions() -> dict[str, str]:
    """The versions of Python and of every installed package in PACKAGES."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # some benchmarks need no peers
    return found


def current_commit(checkout: Path | None = None) -> str:
    """The short hash, with a + if the code has uncommitted changes."""
    checkout = checkout or ROOT
    try:
        changed = run_git(checkout, "status", "--porcelain", "vitrail", "bench/*.py")
        return run_git(checkout, "rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (
        OSError,
        subprocess.CalledProcessError,
    ):  # git is not installed, or this is not a repository
        return "unknown"


def run_git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=checkout, check=True, capture_output=True, text=True
    ).stdout.strip()


def write_result(result: dict[str, Any], folder: Path) -> str:
    """Writes JSON, table and plot of a result; returns the table."""
    page = render_table(result)
    name = result["name"]
    write_file(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_file(folder / f"{name}.md", page)
    if "entries" in result:  # of finetune: a table says all
        return page
    write_file(folder / f"{name}.svg", render_plot(result))
    return page


def render_table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    if "entries" in result:
        return "\n".join([render_finetune(result), format_origin(result), ""])
    if "sets" in result:
        return "\n".join([accuracy_table(result), "", format_origin(result), ""])
    contenders = list(dict.fromkeys(name for case in result["cases"] for name in case["rows"]))
    lines = [format_header(result["name"], contenders)]
    for case in result["cases"]:
        cells = [
            format_cell(case, name, case["rows"][name]) if name in case["rows"] else ""
            for name in contenders
        ]
        lines.append(f"| {case['label']} | {' | '.join(cells)} |")
    lines += ["", format_legend(result, contenders)]
    for profile in result.get("profiles", []):
        lines += ["", profile_table(profile)]
    return "\n".join([*lines, "", format_origin(result), "", describe_noise(result), ""])


def format_header(title: str, columns: list[str]) -> str:
    return f"| {title} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"


def format_cell(case: dict[str, Any], name: str, row: dict[str, Any]) -> str:
    if case["unit"] == "images/s":
        shown = format_number(case["images"] / row["median"])
    else:
        shown = format_number(row["median"] * SCALES[case["unit"]])
    if name == "vitrail":
        return shown
    return f"{shown} ({row['ratio']:.2f} ± {row['spread'] / 2:.2f})"


def format_number(value: float) -> str:
    """Three significant digits, but never fewer than those before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_legend(result: dict[str, Any], contenders: list[str]) -> str:
    units = list(dict.fromkeys(case["unit"] for case in result["cases"]))
    shown = " or ".join(UNITS[unit] for unit in units)
    sentences = [f"{shown[0].upper()}{shown[1:]}; medians over all rounds of two repeats."]
    quantity, meaning = describe_ratio(units)
    sentences.append(RATIO.format(quantity=quantity, meaning=meaning))
    if MATMULS in contenders:
        sentences.append("`matmuls`: only the model's matrix multiplications, a lower bound.")
    if onnx_runtime.NAME in contenders and result["name"] != "engines":
        sentences.append("`onnxruntime`: Vitrail's model exported to ONNX; the others are eager.")
    return " ".join([*sentences, result["note"]] if "note" in result else sentences)


def describe_ratio(units: list[str]) -> tuple[str, str]:
    """What the ratio compares, and what a ratio above 1 means."""
    if units == ["MB"]:
        return "peak memory", "it needs more"
    if "x" in units:
        return "time or memory", "it is slower or needs more"
    return "time", "it is slower"


def profile_table(profile: dict[str, Any]) -> str:
    """The time of a step by kind of operator."""
    peers = list(profile["rows"])
    lines = [format_header(f"profile of a step: {profile['label']}", peers)]
    for group in profile["rows"][peers[0]]:
        cells = [f"{profile['rows'][peer][group]:.1%}" for peer in peers]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    lines += [
        "",
        "`attention` is the fused kernel; where attention is not fused, it is only the softmax.",
    ]
    return "\n".join(lines)


def format_origin(result: dict[str, Any]) -> str:
    """Machines, versions and commits; the entries of an accuracy benchmark may have several."""
    entries = [entry for group in result.get("sets", {}).values() for entry in group] or [result]
    used = [entry["versions"] for entry in entries if "versions" in entry] or [result["versions"]]
    listed = (", ".join(f"{name} {number}" for name, number in one.items()) for one in used)
    machines = [entry.get("machine", result["machine"])["cpu"] for entry in entries]
    commits = list(dict.fromkeys(entry.get("commit", "unknown") for entry in entries))
    return (
        f"{' or '.join(dict.fromkeys(machines))}, {result['machine']['threads']} threads; "
        f"{' or '.join(dict.fromkeys(listed))}; "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
    )


def describe_noise(result: dict[str, Any]) -> str:
    """How many ratios differ between the repeats by more than their spread, and how far."""
    rows = [
        row for case in result["cases"] for name, row in case["rows"].items() if name != "vitrail"
    ]
    unsteady = [row["repeats"] for row in rows if not row["steady"]]
    if not unsteady:
        return "Both repeats agree within the spread."
    worst = max(unsteady, key=lambda repeats: max(repeats) / min(repeats))
    return (
        f"The machine was noisy: the repeats of {len(unsteady)} of {len(rows)} ratios differ by "
        f"more than their spread (worst: {' and '.join(f'{ratio:.2f}' for ratio in worst)})."
    )


def render_plot(result: dict[str, Any]) -> str:
    """An SVG: bars of every contender's ratio, or the curves of an accuracy benchmark."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vitrail"  # the same numbers give the same file
    from matplotlib import pyplot

    figure = plot_accuracy(result) if "sets" in result else plot_ratios(result)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()


def plot_ratios(result: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    cases = result["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["rows"]))
    names.remove("vitrail")
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.8 * len(cases)), layout="constrained")
    height = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        bars = [(j, case["rows"][name]) for j, case in enumerate(cases) if name in case["rows"]]
        axes.barh(
            [j + (i - len(names) / 2 + 0.5) * height for j, _ in bars],
            [row["ratio"] for _, row in bars],
            height,
            xerr=[row["spread"] / 2 for _, row in bars],
            error_kw={"elinewidth": 0.8},
            color="lightgrey" if name == MATMULS else f"C{i}",
            hatch="//" if name == onnx_runtime.NAME else None,
            label=name,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), [case["label"] for case in cases])
    axes.invert_yaxis()
    quantity, _ = describe_ratio(list(dict.fromkeys(case["unit"] for case in cases)))
    axes.set_xlabel(f"{result['name']}: ratio of {quantity} to vitrail (below 1 is better)")
    figure.legend(loc="outside upper center", ncols=max(1, len(names)), frameon=False)
    return figure


def main(names: list[str]) -> None:
    for path in [RESULTS / f"{name}.json" for name in names] or sorted(RESULTS.glob("*.json")):
        if not path.is_file():
            raise UserError(f"{path} does not exist; create it with `python -m bench {path.stem}`")
        print(write_result(json.loads(path.read_text()), RESULTS))


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
