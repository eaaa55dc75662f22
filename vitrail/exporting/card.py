"""The proof card: the numbers of a proof as a small HTML page that works offline."""

from pathlib import Path

from vitrail import __version__
from vitrail.display.page import load_templates
from vitrail.display.text import format_count, format_percent
from vitrail.exporting.proof import Proof


def render_proof(proof: Proof, name: str = "Export") -> str:
    """The page of one proof; `name` is that of the file."""
    template = load_templates(Path(__file__).parent).get_template("card.html")
    return template.render(
        version=__version__,
        name=name,
        proof=proof,
        verdict=describe_verdict(proof),
        summary=summarise_proof(proof),
        accuracy=describe_accuracy(proof),
    )


def describe_verdict(proof: Proof) -> str:
    """One sentence: equal within the tolerance, or how often int8 agrees."""
    if proof.tolerance is not None:
        return f"Equal to PyTorch within {proof.tolerance:.2g}."
    if proof.accuracy is None or proof.agreement is None:
        return "Quantised to int8."
    return (
        f"Quantised to int8: {format_percent(proof.agreement)} of the predictions are the same, "
        f"and the accuracy changes by {-proof.accuracy.loss:+.1f} points."
    )


def summarise_proof(proof: Proof) -> list[tuple[str, str]]:
    """The numbers at the top of the page."""
    kind = "generated images" if proof.generated else "images"
    rows = [
        ("engine", proof.engine),
        (kind, f"{proof.images:,}"),
        ("batch sizes", ", ".join(map(str, proof.batches))),
    ]
    rows += [
        (f"largest difference of {name}", f"{value:.2g}")
        for name, value in proof.differences.items()
    ]
    if proof.agreement is not None:
        rows.append(("agreement", format_percent(proof.agreement)))
        rows.append(("ties", str(proof.ties)))
    return rows


def describe_accuracy(proof: Proof) -> str:
    """The accuracy before and after with the interval of the change; "" without labels."""
    if proof.accuracy is None:
        return ""
    low, high = (100 * bound for bound in proof.accuracy.interval)
    selected = (
        f" The best of {proof.attempts} int8 forms was chosen on these images, so other images "
        f"may lose slightly more."
    )
    return (
        f"{format_percent(proof.accuracy.before)} in PyTorch, "
        f"{format_percent(proof.accuracy.after)} exported, on "
        f"{format_count(proof.accuracy.images, 'labelled image')}. The 95 % confidence interval "
        f"of the change is {low:+.1f} to {high:+.1f} points (paired)."
        f"{selected if proof.attempts > 1 else ''}"
    )
