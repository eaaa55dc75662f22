"""The files of one export under temporary names: all of them appear at the end, or none."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import UserError
from vitrail.exporting.formats import FORMATS
from vitrail.files import atomic_write, describe_os_error

PROOF_JSON, PROOF_HTML = "proof.json", "proof.html"


@dataclass(frozen=True)
class StagedFiles:
    """Where an export is written first, and the paths that its files get in the end."""

    main: Path  # temporary path of the model file, or of Triton's folder
    proof_json: Path
    proof_html: Path
    final: Path
    final_files: tuple[Path, ...]

    def model_files(self) -> list[Path]:
        """The files that a runtime needs, under their temporary names."""
        if self.main.is_dir():
            cards = (self.proof_json, self.proof_html)
            return [file for file in self.main.rglob("*") if file.is_file() and file not in cards]
        return [file for file in (self.main, self.main.with_suffix(".bin")) if file.is_file()]


def check_export_target(target: Path, to: str, name: str, overwrite: bool) -> None:
    """Raises unless the export may be written to `target`."""
    suffix = FORMATS[to].suffix
    if suffix and target.suffix != suffix:
        raise UserError(
            f"{target} does not end in {suffix}, as files for {to} do; choose another `out`"
        )
    if not suffix and (target / name).exists():
        raise UserError(f"{target / name} already exists; remove it, or choose another `name`")
    if not suffix and target.is_file():
        raise UserError(f"{target} is a file, not a folder; choose another `out`")
    if suffix and target.is_dir():
        raise UserError(f"{target} is a folder; choose another `out`")
    if suffix and target.exists() and not overwrite:
        raise UserError(f"{target} already exists; choose another `out`, or set `overwrite`")


@contextmanager
def stage_files(target: Path, to: str, name: str) -> Iterator[StagedFiles]:
    """Yields temporary paths; if the block succeeds, the files move, the model file last."""
    final = target / name if to == "triton" else target
    try:
        with ExitStack() as stack:
            main = stack.enter_context(atomic_write(final))  # entered first: renamed last
            if to == "triton":
                main.mkdir()
                yield StagedFiles(main, main / PROOF_JSON, main / PROOF_HTML, final, (final,))
                return
            json, html = (
                final.with_name(f"{final.name}.{card}") for card in (PROOF_JSON, PROOF_HTML)
            )
            staged_json = stack.enter_context(atomic_write(json))
            staged_html = stack.enter_context(atomic_write(html))
            files = [final, json, html]
            if to == "openvino":  # which has a second file, for the weights
                files.insert(1, final.with_suffix(".bin"))
                staged_weights = stack.enter_context(atomic_write(files[1]))
            yield StagedFiles(main, staged_json, staged_html, final, tuple(files))
            if to == "openvino":
                shutil.move(main.with_suffix(".bin"), staged_weights)
    except OSError as error:
        why = describe_os_error(error)
        raise UserError(f"cannot write {final}: {why}; nothing was written") from error
