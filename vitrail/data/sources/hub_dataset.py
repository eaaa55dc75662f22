"""Data sets from the Hugging Face hub, `hf:owner/name`: their parquet files, downloaded once."""

import hashlib
import logging
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.config import Columns, LabelKind
from vitrail.data.sources.download import describe_write_error, lock_downloads
from vitrail.data.sources.parquet import convert_parquet, import_parquet
from vitrail.data.sources.places import data_folder
from vitrail.data.sources.shards import ShardSource, find_shards, open_shards
from vitrail.data.sources.tree import FolderTree
from vitrail.data.split import SPLIT_ALIASES
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError
from vitrail.hub import (
    TIMEOUT,
    download_hub_file,
    import_hub,
    offline_error,
    report_hub_errors,
)

PREFIX = "hf:"
CONVERTED = "refs/convert/parquet"  # the branch where the hub has other data sets as parquet
NUMBERED = re.compile(r"(.+?)-\d+(-of-\d+)?")  # train-00000-of-00004

log = logging.getLogger(__name__)


def open_hub_dataset(
    data: str,
    *,
    columns: Columns,
    labels: LabelKind | None,
    classes: Sequence[str] | None,
    split: bool,
    progress: bool,
) -> ShardSource:
    """Opens `hf:owner/name`, `hf:owner/name/configuration` or either with `@revision`."""
    name, _, revision = data.removeprefix(PREFIX).partition("@")
    owner, _, rest = name.partition("/")
    repository, _, configuration = rest.partition("/")
    if not owner or not repository:
        raise UserError(f"{data} is not a data set of the hub; write hf:owner/name")
    folder = shard_folder(data, columns, labels)
    if not folder.is_dir():
        import_parquet()
        with lock_downloads(folder.parent):
            if not folder.is_dir():  # another process may have been faster
                request = Request(f"{owner}/{repository}", configuration, revision, columns, labels)
                fetch(request, folder, progress)
    tree = FolderTree(folder)
    source = open_shards(
        tree,
        find_shards(tree),
        classes=classes,
        split=split,
        progress=progress,
        labels=labels,
        separator=columns.separator,
    )
    return replace(source, name=repository)


@dataclass(frozen=True)
class Request:
    """What is wanted of which data set."""

    repository: str
    configuration: str
    revision: str
    columns: Columns
    labels: LabelKind | None


def shard_folder(data: str, columns: Columns, labels: LabelKind | None) -> Path:
    """The folder of the shards, which depends on the columns that were chosen."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", data.removeprefix(PREFIX))[:100]
    wanted = f"{data}\n{columns.path}\n{columns.label}{' multi' * (labels == 'multi')}"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    return data_folder() / "hf" / f"{readable}-{digest[:8]}"


def fetch(request: Request, folder: Path, progress: bool) -> None:
    """Downloads the parquet files of a data set, and writes their images as shards to `folder`."""
    repository = request.repository
    hub = import_hub(repository)
    if hub.constants.HF_HUB_OFFLINE:
        raise offline_error(repository)
    with report_hub_errors(repository):
        branch, listed = list_parquet(hub, repository, request.revision)
    chosen = choose_files(repository, listed, request.configuration)
    try:
        with files.atomic_write(folder) as temporary:
            temporary.mkdir()
            write_shards(request, branch, chosen, temporary, progress)
    except OSError as error:
        raise UserError(describe_write_error(folder, error)) from error


def list_parquet(hub: Any, repository: str, revision: str) -> tuple[str | None, list[str]]:
    """The branch with parquet files, and these files: of the data set, else the hub's own."""
    api = hub.HfApi(endpoint=hub.constants.ENDPOINT)
    for branch in [revision or None] if revision else [None, CONVERTED]:
        try:
            info = api.dataset_info(repository, revision=branch, timeout=TIMEOUT)
        except hub.errors.RevisionNotFoundError:
            if branch == CONVERTED:
                break
            raise
        names = [sibling.rfilename for sibling in info.siblings or []]
        if found := sorted(name for name in names if name.endswith(".parquet")):
            return branch, found
    raise UserError(
        f"hf:{repository} has no parquet files; download it and give the folder of its images"
    )


def choose_files(repository: str, listed: Sequence[str], configuration: str) -> dict[str, str]:
    """The parquet files of one configuration, each with its split ("" if it has none)."""
    found: dict[str, dict[str, str]] = {}
    for name in listed:
        folder, split = parse_name(name)
        if split.startswith("partial-"):
            raise UserError(f"the hub has only a part of hf:{repository} as parquet: {name}")
        found.setdefault(folder, {})[name] = split
    if configuration and configuration not in found:
        raise UserError(f"hf:{repository} has no {configuration!r}; it has {', '.join(found)}")
    if not configuration and len(found) > 1:
        names = ", ".join(found)
        raise UserError(
            f"hf:{repository} has several configurations, {names}: write "
            f"hf:{repository}/{next(iter(found))}"
        )
    parts = found[configuration] if configuration else next(iter(found.values()))
    known = {
        name: SPLIT_ALIASES[split.casefold()]
        for name, split in parts.items()
        if split.casefold() in SPLIT_ALIASES
    }
    if not known:
        return dict.fromkeys(parts, "")
    if left_out := sorted(set(parts.values()) - {parts[name] for name in known}):
        log.warning("hf:%s: splits left out: %s", repository, ", ".join(left_out))
    return known


def parse_name(name: str) -> tuple[str, str]:
    """The configuration and the split in the name of a parquet file."""
    folder, file = posixpath.split(name)
    stem = file.removesuffix(".parquet")
    if stem.isdecimal():  # default/train/0000.parquet
        return posixpath.split(folder)
    match = NUMBERED.fullmatch(stem)  # data/train-00000-of-00001.parquet
    return folder, match[1] if match else stem


def write_shards(
    request: Request, branch: str | None, chosen: dict[str, str], folder: Path, progress: bool
) -> None:
    repository = request.repository
    names: tuple[str, ...] | None = None
    with progress_bar("downloading", len(chosen), show=progress) as advance:
        for number, (name, split) in enumerate(chosen.items()):
            with report_hub_errors(repository):
                file = download_hub_file(repository, branch, name, "dataset")
            if file is None:
                raise UserError(f"hf:{repository} no longer has {name}; try again")
            shard = folder / f"{split or 'part'}-{number:05d}.tar"
            title = f"hf:{repository}, {name}"
            found = convert_parquet(file, title, shard, request.columns, request.labels)
            if found is not None and names not in (None, found):
                raise UserError(f"hf:{repository}, {name}: other class names than in other files")
            names = found if found is not None else names
            advance(1)
    if names is None:
        raise UserError(f"hf:{repository} has no labels")
    if names:
        (folder / "classes.txt").write_text("\n".join(names) + "\n", "utf-8")
