"""Holds the house to its rules: directions, names, words that stay true, what is forbidden."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import vitrail
from tests.shapes import Tracer, claims
from vitrail.data.config import AUGMENT_PRESETS, Augment, DataConfig, Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.embed import rotary_positions
from vitrail.model.vit import ViT
from vitrail.pretraining.config import JointConfig, PretrainConfig
from vitrail.run.auto import DataSummary, choose_from_scratch
from vitrail.run.fine_tuning import Budget, choose_fine_tuning
from vitrail.run.recipe import settings_to_dict
from vitrail.run.semi_supervised import choose_joint, plan_joint
from vitrail.run.unlabelled import choose_pretraining
from vitrail.training.config import TrainConfig
from vitrail.zoo.presets import PRESETS, preset
from vitrail.zoo.weights import PUBLISHED

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitrail"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROWS = [  # a folder imports only from lower rows
    ["cli", "server"],
    ["tuning"],
    ["run", "batch"],
    ["inference"],
    ["zoo", "insight", "heads", "pretraining", "exporting", "audit"],
    ["model", "data", "training", "evaluation"],
    ["display"],
]
FREE_OF_TORCH = [
    "vitrail.heads.kinds",
    "vitrail.model.config",
    "vitrail.model.cost",
    "vitrail.zoo.presets",
    "vitrail.zoo.weights",
    "vitrail.cli.main",
]


def folder_of(module: str) -> str:
    """The first folder below the package, or "" for `errors`, `files` and the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and any(parts[1] in row for row in ROWS) else ""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def stray(path: Path, importing: str) -> bool:
    """Whether this arrow points sideways or up."""
    mine = folder_of(f"vitrail.{path.relative_to(PACKAGE).parts[0].removesuffix('.py')}")
    theirs = folder_of(importing)
    rows = {folder: number for number, row in enumerate(ROWS) for folder in row}
    return bool(mine and theirs) and mine != theirs and rows[theirs] <= rows[mine]


def test_every_folder_has_its_row():
    folders = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders <= {folder for row in ROWS for folder in row}


def test_imports_point_down():
    arrows = [
        (path, name) for path in MODULES for name in imports(path) if name.startswith("vitrail")
    ]
    assert not [arrow for arrow in arrows if stray(*arrow)]


def test_a_stray_arrow_would_be_seen():
    assert stray(PACKAGE / "model" / "vit.py", "vitrail.data.image")
    assert stray(PACKAGE / "zoo" / "load.py", "vitrail.run.run")
    assert not stray(PACKAGE / "run" / "run.py", "vitrail.zoo.presets")


def test_there_is_no_drawer_for_leftovers():
    names = {"utils", "util", "common", "misc", "helpers", "helper"}
    assert not [
        path for path in MODULES if names & set(path.relative_to(PACKAGE).with_suffix("").parts)
    ]


def test_folders_import_nothing_by_themselves():
    assert not [path for path in PACKAGE.glob("*/**/__init__.py") if list(imports(path))]


FORBIDDEN = {
    "an unsafe module": lambda node: (
        isinstance(node, ast.Import | ast.ImportFrom)
        and bool(
            {"pickle", "cPickle", "_pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal"}
            & {name.split(".")[0] for name in imported(node)}
        )
    ),
    "strict=False": lambda node: (
        called(node, "load_state_dict") and keyword(node, "strict") is False
    ),
    "torch.load without weights_only=True": lambda node: (
        called(node, "load")
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and keyword(node, "weights_only") is not True
    ),
    "allow_pickle=True": lambda node: (
        isinstance(node, ast.Call) and keyword(node, "allow_pickle") not in (None, False)
    ),
}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]


def called(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name


def keyword(node: ast.Call, name: str) -> object:
    """The literal given for a keyword, None if it is not given, "?" if it is no literal."""
    for given in node.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else "?"
    return None


def sins(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    return [name for name, forbidden in FORBIDDEN.items() if any(forbidden(node) for node in nodes)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unsafe_is_written(path):
    assert sins(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "model.load_state_dict(x, strict=False)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
    ],
)
def test_unsafe_code_would_be_seen(source):
    assert len(sins(source)) == 1


# ---- words

WORDY = (
    *("vitrail/**/*.py", "vitrail/**/*.html", "vitrail/**/*.js"),
    *("bench/*.py", "book/*", "docs/*.md"),
)
TEXTS = sorted(
    path
    for pattern in WORDY
    for path in ROOT.glob(pattern)
    if path.suffix in (".py", ".html", ".js", ".md")
) + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
QUAINT = re.compile(r"\b(is|are) no [a-z]+")  # "x is not a matrix", never "x is no matrix"
FLAG = re.compile(r"(?<![\w(-])--[a-z][\w.-]*")
COMMAND = re.compile(r"`vitrail [^`]*`")  # a whole command may be quoted
WRITES_COMMANDS = {  # that repeats the run; that sends an image
    PACKAGE / "run" / "report" / "page.py",
    PACKAGE / "server" / "requests.py",
}
PARTICIPLES = {  # irregular ones; the regular ones end in -ed
    *("told", "found", "seen", "kept", "made", "drawn", "shown", "gone", "begun", "taken", "given"),
    *("held", "known", "heard", "said", "sent", "left", "lost", "met", "built", "bent", "sought"),
    *("thought", "bought", "brought", "caught", "spread", "chosen", "written", "spoken", "hidden"),
}
ENDS_IN_ED = {"embed", "seed", "feed", "need", "speed", "shed"}  # verbs and nouns


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public functions and methods of a module; a property is a value, not a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(one) for one in node.decorator_list}
            values = {"property", "cached_property", "functools.cached_property"}
            if not node.name.startswith("_") and not decorators & values:
                yield node


def is_participle(name: str) -> bool:
    return "_" not in name and (
        name in PARTICIPLES or (name.endswith("ed") and name not in ENDS_IN_ED)
    )


def messages(tree: ast.Module) -> Iterator[str]:
    """Every text in the code but docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if id(node) not in docstrings else []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_no_thing(path):
    assert not [match[0] for match in QUAINT.finditer(path.read_text())]


def test_functions_are_not_named_by_bare_participles():
    assert not [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in MODULES
        for node in functions(ast.parse(path.read_text()))
        if is_participle(node.name)
    ]


def test_only_the_command_line_speaks_of_flags():
    assert not [
        f"{path.relative_to(ROOT)}: {text}"
        for path in MODULES
        if folder_of(module_of(path)) != "cli"
        for text in messages(ast.parse(path.read_text()))
        if FLAG.search(COMMAND.sub("", text)) and path not in WRITES_COMMANDS
    ]


def test_one_name_has_one_meaning():
    homes: dict[str, set[str]] = {}
    for path in MODULES:
        if folder_of(module_of(path)) == "cli" or path.name == "config.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module_of(path))
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_quaint_words_would_be_seen():
    assert QUAINT.search("a list is no matrix") and not QUAINT.search("there is nothing here")
    assert is_participle("told") and is_participle("prepared")
    assert not is_participle("embed") and not is_participle("find_copies")
    tree = ast.parse('"""Says --out."""\nraise UserError("choose another --out")')
    assert [text for text in messages(tree) if FLAG.search(text)] == ["choose another --out"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def code_lines(node: ast.FunctionDef) -> int:
    """The lines of a function's body, without signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_function_of_a_run_is_long():
    long = [
        f"{path.name}: {node.name}"
        for path in (PACKAGE / "run").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and code_lines(node) > 40
    ]
    assert not long


# ---- folders


def imported_folders(folder: Path) -> set[str]:
    """The other folders that the modules of a folder import from, also inside functions."""
    found = {folder_of(name) for path in folder.rglob("*.py") for name in imports(path)}
    return found - {"", folder.name}


@pytest.mark.parametrize(
    "folder", sorted({folder for row in ROWS for folder in row if (PACKAGE / folder).is_dir()})
)
def test_a_folder_says_what_it_imports(folder):
    words = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
    line = re.search(r"^Imports (.*)\.$", words, re.MULTILINE)
    assert line is not None, "its __init__ ends with 'Imports a, b.' or 'Imports no other folder.'"
    named = set() if line[1] == "no other folder" else set(line[1].split(", "))
    assert named == imported_folders(PACKAGE / folder)


def test_every_public_name_is_there():
    assert sorted(vitrail.__all__) == sorted(vitrail._HOMES)
    for name in vitrail.__all__:
        assert getattr(vitrail, name).__module__ == vitrail._HOMES[name]


def test_no_folder_has_the_name_of_a_public_function():
    assert not [name for name in vitrail.__all__ if (PACKAGE / name).is_dir()]


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Vit'"):
        vitrail.Vit  # noqa: B018


def used_settings() -> dict[str, set[str]]:
    """Each setting of a model, with the presets and published files that change it."""
    configs = dict(PRESETS)
    for path in (ROOT / "tests" / "parity").glob("fixtures/*.json"):
        configs[path.stem] = json.loads(path.read_text())["config"]
    defaults = {field.name: field.default for field in fields(ViTConfig)}
    return {
        name: {source for source, config in configs.items() if config.get(name, default) != default}
        for name, default in defaults.items()
    }


def test_no_setting_of_a_model_is_dead():
    assert not [name for name, users in used_settings().items() if not users]


OPERATIONAL = {  # how a run is carried out, not what it learns; and what only the user can know
    *("train.save_every", "train.log_every", "train.precision", "train.seed", "train.patience"),
    *("data.skip_broken", "data.workers", "data.cache_gb", "data.disk_gb", "data.columns"),
    *("data.labelled", "data.shuffle", "pretrain.comparison", "train.shard", "train.recompute"),
}


def chosen_settings() -> Iterator[dict[str, dict[str, object]]]:
    """Every recipe, what `train` chooses for several data sets, and published preprocessing."""
    for path in (ROOT / "recipes").glob("*.toml"):
        yield tomllib.loads(path.read_text())
    even = DataSummary(images=5000, classes=10, side=32, channels=3, imbalance=1.0)
    for summary in (even, replace(even, imbalance=5.0), replace(even, imbalance=1000.0)):
        for minutes in (1.0, 10.0, 600.0):
            yield choose_from_scratch(summary, minutes=minutes).settings
    yield choose_from_scratch(replace(even, side=400), minutes=10.0).settings
    for change in ({"pixels": "uint16"}, {"labels": "multi"}):
        yield choose_from_scratch(replace(even, **change), minutes=10.0).settings
    few, vit = replace(even, side=400, images=100), preset("Ti/16")
    budget = Budget(seconds=60.0, speed=50.0)
    for images, tune in ((100, "auto"), (100, "lora"), (5000, "all")):
        photos = replace(few, images=images)
        yield choose_fine_tuning(
            photos, "Ti/16", vit, None, None, tune=tune, budget=budget
        ).settings
    grey = replace(even, side=8, channels=1)
    for images in (even, grey, replace(even, side=400)):
        for method in ("masked", "views"):
            yield choose_pretraining(images, method, device="cuda").settings
        joint = choose_joint(images, 0.5)
        yield {"joint": settings_to_dict(plan_joint(joint, images.images, 400_000, {}))}
    for published in PUBLISHED:
        yield {"preprocess": published.preprocess}


@pytest.mark.parametrize(
    ("section", "config"),
    [
        *[("train", TrainConfig), ("data", DataConfig), ("preprocess", Preprocess)],
        *[("pretrain", PretrainConfig), ("joint", JointConfig)],
    ],
)
def test_no_setting_of_a_run_is_dead(section, config):
    tables = [settings.get(section, {}) for settings in chosen_settings()]
    dead = [
        f"{section}.{field.name}"
        for field in fields(config)
        if all(table.get(field.name, field.default) == field.default for table in tables)
    ]
    assert set(dead) <= OPERATIONAL


def test_no_setting_of_augmentation_is_dead():
    plain = Augment()
    assert not [
        field.name
        for field in fields(Augment)
        if all(
            getattr(level, field.name) == getattr(plain, field.name)
            for level in AUGMENT_PRESETS.values()
        )
    ]


def test_every_shape_comment_is_true():
    tracer = Tracer({k: v for path in PACKAGE.glob("model/*.py") for k, v in claims(path).items()})
    trace_models(tracer)
    assert not tracer.wrong
    assert not {f"{Path(f).name}:{line}" for f, line in tracer.claims.keys() - tracer.reached}


def trace_models(tracer: Tracer) -> None:
    """Runs every branch of the model, at sizes that all differ."""
    sizes = {"channels": 5, "classes": 7, "width": 24, "depth": 1, "heads": 3, "mlp_ratio": 1.5}
    legend = {"B": 2, "C": 5, "H": 12, "W": 20, "P": 15, "D": 24, "h": 3, "d": 8, "K": 7, "M": 36}
    sizes |= {"image": (12, 20), "patch": 4}
    x, keep = torch.randn(2, 5, 12, 20), torch.tensor([[0, 14, 3, 7], [5, 1, 2, 3]])

    plain = ViT(ViTConfig(**sizes | {"depth": 2}, drop_path=0.5))
    tracer.run(lambda: plain(x), N=16, **legend)
    tracer.run(torch.no_grad()(lambda: plain(x)), N=16, **legend)  # the MLP in place
    tracer.run(lambda: plain.eval().features(x), N=16, **legend)
    tracer.run(lambda: plain(torch.randn(2, 5, 12, 28)), N=22, **legend | {"W": 28, "P": 21})
    attention, tokens = plain.blocks[0].attn, torch.randn(2, 16, 24)
    tracer.run(lambda: attention.weights(tokens, [0, 2]), N=16, **legend)

    distilled = ViT(ViTConfig(**sizes, distilled=True, positions="rotary"))
    tracer.run(lambda: distilled(x), N=17, **legend)
    rope = rotary_positions((3, 5), 8, 2, x)
    tracer.run(lambda: distilled._select_rotations(rope, keep), N=6, **legend)
    for pool in ({"pool": "avg"}, {"pool": "avg", "norm_after_pool": True}):
        pooled = ViT(ViTConfig(**sizes, **pool, registers=4, positions="sincos"))
        tracer.run(lambda pooled=pooled: pooled(x), N=19, **legend)
    both = ViT(ViTConfig(**sizes, pool="cls_avg"))
    tracer.run(lambda: both(x), N=16, **legend)
    asking = ViT(ViTConfig(**sizes, pool="map"))
    tracer.run(
        lambda: asking(x), **legend
    )  # without N: the MLP after its one question sees one token
    tracer.run(lambda: asking.attn_pool.weights(torch.randn(2, 15, 24)), **legend)

    for stem in ("conv", "r9"):
        model = ViT(ViTConfig(**sizes, stem=stem))
        tracer.run(lambda model=model: model.embed(x, keep[:, :3]), N=4, **legend)
    hybrid = ViT(ViTConfig(**sizes | {"patch": 32, "image": (64, 160)}, stem="r26"))
    wide = legend | {"H": 64, "W": 160, "P": 10}
    tracer.run(lambda: hybrid(torch.randn(2, 5, 64, 160)), N=11, **wide)


def test_a_false_shape_comment_would_be_seen(tmp_path, monkeypatch):
    lines = [
        "def turn(x):  # (B, D)",
        "    y = x.T  # (B, D)",
        "    never = 0 if len(x) else x.T",
        "    if never is not None:",
        "        return y  # (D, B)",
        "    y = y.T  # (B, D)",
    ]
    (tmp_path / "wrong_shapes.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("wrong_shapes")
    tracer = Tracer(claims(tmp_path / "wrong_shapes.py"))
    tracer.run(lambda: module.turn(torch.zeros(2, 3)), B=2, D=3)
    assert tracer.wrong == {"wrong_shapes.py:2 says (B, D), got (3, 2)"}
    assert {line for _, line in tracer.claims.keys() - tracer.reached} == {6}


def test_tree_is_the_first_line_of_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"```\n(vitrail/\n.*?)```", text, re.DOTALL)
    assert block is not None
    assert block[1] == tree()


def tree() -> str:
    """The package as CONTRIBUTING shows it: each folder and module with its first line."""
    order = [path for path in sorted(PACKAGE.glob("*.py")) if not path.name.startswith("__")]
    for row in reversed(ROWS):
        for folder in row:
            order += modules_below(PACKAGE / folder)
    return "\n".join(["vitrail/", *map(line_of, order)]) + "\n"


def modules_below(folder: Path) -> list[Path]:
    """Its own `__init__`, its modules, then its subfolders."""
    if not (folder / "__init__.py").is_file():
        return []
    own = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    inner = sorted(path.parent for path in folder.glob("*/__init__.py"))
    return [folder / "__init__.py", *own, *(p for below in inner for p in modules_below(below))]


def line_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    is_folder = path.name == "__init__.py"
    name = f"{parts[-2]}/" if is_folder else path.name
    indent = "  " * (len(parts) - 1 if is_folder else len(parts))
    words = ast.get_docstring(ast.parse(path.read_text())) or "no docstring"
    return f"{indent + name:<24}{words.splitlines()[0]}"


def blocks(language: str) -> list[str]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [
        b
        for page in pages
        for b in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    ]


def test_python_in_readme_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    ((label, probability),) = re.findall(r"print\(.*\)  # (\d) (\d+)%", "".join(blocks("python")))
    printed = capsys.readouterr().out.split()
    assert printed[0] == label
    assert abs(int(printed[1].rstrip("%")) - int(probability)) <= 5  # processors round differently


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) < 8000


def test_shell_in_readme_parses():
    for block in blocks("sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_every_document_has_the_version_of_the_package():
    newest = re.search(
        r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    citation = (ROOT / "CITATION.cff").read_text()
    assert newest and newest[1] == vitrail.__version__
    assert f"version: {newest[1]}\ndate-released: {newest[2]}\n" in citation


def test_ci_runs_the_command_that_readme_names():
    assert "make test" in blocks("sh")[0] + "".join(blocks("sh"))
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")
    ]
    assert commands == ["make test"]


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_help_does_not_wait_for_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(
        re.sub(r"```\nvitrail/\n.*?```", f"```\n{tree()}```", page.read_text(), flags=re.DOTALL)
    )
