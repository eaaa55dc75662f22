"""What an attack found: hostile files, numbers, environments, signals and arguments."""

import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.arguments import suits
from vitrail.data.reading import cache
from vitrail.data.sources import index_cache
from vitrail.data.sources.shards import build_index
from vitrail.errors import UserError
from vitrail.heads.file import read_head_file
from vitrail.inference.monitor import read_predictions
from vitrail.run.recipe import read_recipe
from vitrail.server.config import read_token
from vitrail.tuning.plan import PLAN, read_plan
from vitrail.tuning.space import parse_space, read_space
from vitrail.tuning.storage import check_journal

DEEP = "[" * 100_000 + "]" * 100_000


def one_line(error) -> bool:
    return "\n" not in str(error.value) and len(str(error.value)) < 500


# ---- tar


def tar_header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A header whose size field holds any bytes."""
    info = tarfile.TarInfo(name)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157] = size.ljust(12, b"\0"), kind
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def pax_chain(count: int) -> bytes:
    record = b"30 comment=aaaaaaaaaaaaaaaaaa\n"
    size = f"{len(record):011o}".encode()
    return (tar_header("a", size, b"x") + record.ljust(512, b"\0")) * count


def long_links(count: int) -> bytes:
    return (tar_header("././@LongLink", b"00000000010", b"L") + b"name".ljust(512, b"\0")) * count


HUGE_SIZE = b"\x80" + struct.pack(">Q", 0)[:1] + (1_200_000 * 10**18).to_bytes(10, "big")
TARS = {
    "size of 1.2e24": tar_header("a.jpg", HUGE_SIZE) + bytes(1024),
    "chained PAX headers": pax_chain(5000) + bytes(1024),
    "chained long links": long_links(5000) + bytes(1024),
}


@pytest.mark.parametrize("content", TARS.values(), ids=TARS)
def test_a_hostile_tar_is_one_line(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match="shard") as caught:
        build_index(tmp_path / "a.tar", (tmp_path / "a.tar", 0, len(content)))
    assert one_line(caught)


# ---- JSON and TOML


def test_deeply_nested_json_is_one_line(tmp_path):
    (tmp_path / PLAN).write_text(f'{{"data": {DEEP}}}')
    with pytest.raises(UserError, match="is damaged") as caught:
        read_plan(tmp_path)
    assert one_line(caught)
    (tmp_path / "journal.log").write_text(f'{{"op_code": 0}}\n{{"a": {DEEP}}}\n')
    with pytest.raises(UserError, match="line 2") as caught:
        check_journal(tmp_path / "journal.log")
    assert one_line(caught)


@pytest.mark.parametrize("changes", [{"space": []}, {"space": 3}, {"base": 1}, {"grid": "no"}, {}])
def test_a_plan_of_wrong_types_is_one_line(tmp_path, changes):
    plan = {"data": "digits", "fingerprint": "", "settings": {}, "request": {}, "base": {}}
    plan |= {"space": {}, "grid": False, "minutes": None, "format": 2, **changes}
    (tmp_path / PLAN).write_text(json.dumps(plan))
    with pytest.raises(UserError, match="is damaged") as caught:
        read_plan(tmp_path)
    assert one_line(caught)


def test_a_space_that_is_not_a_table_is_one_line():
    with pytest.raises(UserError, match="give a table of settings"):
        parse_space(["train.lr"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "read",
    [read_recipe, read_space, vitrail.load, read_predictions, read_head_file, read_token],
)
def test_pipes_and_devices_are_not_read(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            read(path)


def test_a_shard_of_an_impossible_name_is_one_line(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"head.weight": "a\0b"}}))
    with pytest.raises(UserError, match="not in the same folder"):
        vitrail.load(index)


def test_a_long_recipe_is_not_read_whole(tmp_path):
    with (tmp_path / "recipe.toml").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match="longer than"):
        read_recipe(tmp_path / "recipe.toml")


# ---- numbers


@pytest.mark.parametrize("value", [10**18, 10**39, 10**400])
@pytest.mark.parametrize("name", ["width", "depth", "heads", "classes", "image", "registers"])
def test_a_huge_architecture_is_one_line(name, value):
    with pytest.raises(UserError, match=f"{name} is .* at most") as caught:
        vitrail.ViTConfig(**{name: value})
    assert one_line(caught)


@pytest.mark.parametrize("value", [10**18, 10**39])
@pytest.mark.parametrize("name", ["epochs", "batch", "patience", "save_every"])
def test_a_huge_training_is_one_line(name, value):
    with pytest.raises(UserError, match=f"train.{name}"):
        vitrail.train("digits", settings={"train": {name: value}})


def test_images_of_the_year_2381_are_read(tmp_path):
    for label in "ab":
        for number in range(12):
            path = tmp_path / label / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(path)
            os.utime(path, (1.3e10, 1.3e10))  # ext4 ends in 2446, int64 nanoseconds in 2262
    source = vitrail.open_data(tmp_path)
    assert len(source) == 24 and source.mtimes.max() > 0


# ---- the cache folder


def encrypt(path: Path) -> None:
    """Sets the flag of encrypted entries in an archive."""
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        start = content.find(mark)
        while start >= 0:
            content[start + place] |= 1
            start = content.find(mark, start + 4)
    path.write_bytes(content)


def raise_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = content.find(b"PK\1\2")
    while start >= 0:
        content[start + 6] = 99  # the version of zip that the entry needs
        start = content.find(b"PK\1\2", start + 4)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [encrypt, raise_version])
def test_a_damaged_cache_is_made_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    index_cache.save_arrays("shards", Path("a"), {"x": np.arange(3)})
    path = index_cache.cache_path("shards", Path("a"))
    assert zipfile.is_zipfile(path) and "x" in index_cache.load_arrays("shards", Path("a"))
    damage(path)
    assert index_cache.load_arrays("shards", Path("a")) == {}
    folder = tmp_path / "images"
    folder.mkdir()
    np.savez(folder / "index.npz", items=np.arange(1), shapes=np.ones((1, 3), np.int64))
    damage(folder / "index.npz")
    assert cache.open_cache(folder, np.dtype(np.uint8)) is None


@pytest.mark.parametrize("note", ["[1]", '{"a": "b"}', '{"1": 2}', DEEP])
def test_a_damaged_note_of_broken_images_is_made_anew(tmp_path, note):
    (tmp_path / "broken.json").write_text(note)
    with pytest.raises((ValueError, OSError)):
        cache.read_broken(tmp_path / "broken.json")


# ---- environments


def run(code: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{k: v for k, v in changes.items() if v is not None}}
    for name, value in changes.items():
        if value is None:
            environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_user_without_a_home_has_a_cache():
    code = """
import os, pwd
pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))
from vitrail.data.sources.places import cache_folder
assert "vitrail" in str(cache_folder()), cache_folder()
"""
    done = run(code, HOME=None, XDG_CACHE_HOME=None, VITRAIL_CACHE=None)
    assert done.returncode == 0, done.stderr


def test_a_closed_stderr_is_no_traceback(tmp_path):
    code = f"""
import sys
sys.stderr = None
from vitrail.cli.main import main
main(["models", "--json"])
try:
    main(["predict", {str(tmp_path / "absent")!r}, "a.png"])
except SystemExit as error:
    assert "does not exist" in str(error), error
"""
    done = run(code)
    assert done.returncode == 0, done


def test_figures_do_not_need_the_latex_of_a_matplotlibrc():
    import matplotlib

    from vitrail.display.figures import Chart, Curve, draw_curves, to_png

    with matplotlib.rc_context({"text.usetex": True, "figure.dpi": 17}):
        chart = Chart(curves=[Curve(label="50 %_x", x=[0, 1], y=[0, 1])], x="step", y="loss")
        assert to_png(draw_curves(chart))
        assert matplotlib.rcParams["text.usetex"] is True


# ---- Python arguments


def network():
    return vitrail.ViT(vitrail.ViTConfig(image=8, patch=4, width=8, depth=1, heads=1, classes=2))


def classifier():
    from vitrail.data.config import Preprocess

    return vitrail.Classifier(network(), ["a", "b"], Preprocess(size=8), device="cpu")


BLACK = np.zeros((8, 8, 3), np.uint8)
CALLS = {
    "top is a string": (lambda: classifier().predict(BLACK, top="3"), "`top`"),
    "raw is a string": (lambda: classifier().predict(BLACK, raw="no"), "`raw`"),
    "coverage is a string": (lambda: classifier().predict(BLACK, coverage="0.9"), "`coverage`"),
    "target is a float": (lambda: classifier().explain(BLACK, 1.5), "`target`"),
    "index of a list": (lambda: classifier().index(["a"]), "`name`"),
    "data is a number": (lambda: classifier().evaluate(5), "`data`"),
    "split is a number": (lambda: classifier().evaluate("digits", split=3), "`split`"),
    "train on a number": (lambda: vitrail.train(5), "`data`"),
    "minutes is a string": (lambda: vitrail.train("digits", minutes="5"), "`minutes`"),
    "settings is a list": (lambda: vitrail.train("digits", settings=[1]), "`settings`"),
    "load a number": (lambda: vitrail.load(5), "`path`"),
    "load None": (lambda: vitrail.load(None), "`path`"),
    "vit is a string": (lambda: vitrail.load("x", vit="heads"), "`vit`"),
    "open a list": (lambda: vitrail.open_data(["a"]), "`data`"),
    "preset of a number": (lambda: vitrail.preset(16), "`name`"),
    "depth is a string": (lambda: vitrail.preset("S/16", depth="12"), "`depth`"),
    "compare numbers": (lambda: vitrail.compare(1, 2), "."),
    "verify a number": (lambda: vitrail.verify(1), "`model`"),
    "convert to a number": (lambda: vitrail.convert("x", to=3, out="y"), "`to`"),
    "a list as data": (lambda: vitrail.check([]), "`data`"),
    "a list as foreign images": (lambda: classifier().evaluate("digits", foreign=[]), "`foreign`"),
    "export to a list": (lambda: classifier().export("a.onnx", to=[]), "`to`"),
    "a backbone of a number": (lambda: vitrail.load_backbone(5), "`path`"),
    "a client of a number": (lambda: vitrail.client(5), "`url`"),
    "an unknown keyword": (lambda: vitrail.train("digits", epoch=3), "epoch"),
    "attention of a number": (lambda: vitrail.attention(5, 5), "`model`"),
    "attention in a number": (lambda: vitrail.attention(network(), 5), "`images`"),
    "forward of a number": (lambda: network()(5), "`x`"),
    "blocks is a string": (lambda: network().block_indices("0"), "`blocks`"),
    "a model of a number": (lambda: vitrail.Classifier(5, ["a"], {}), "`model`"),
    "a name as a model": (lambda: vitrail.Classifier("x", ["a"], {}), "`model`"),
    "predict each of a number": (lambda: classifier().predict_each(5), "`images`"),
    "predict each of a path": (lambda: classifier().predict_each("a.png"), "`images`"),
    "views is a string": (lambda: classifier().with_views("2"), "`views`"),
    "layers of strings": (lambda: classifier().explain(BLACK, layers=["a"]), "`layers`"),
    "split is a list": (lambda: classifier().evaluate("digits", split=[]), "`split`"),
    "an object as data": (lambda: classifier().evaluate(object()), "`data`"),
    "engine is an array": (lambda: vitrail.load("x", engine=BLACK), "`engine`"),
    "no kinds": (lambda: vitrail.compare_heads("x", "digits", kinds=[]), "`kinds`"),
    "settings by numbers": (lambda: vitrail.train("digits", settings={5: 5}), "`settings`"),
    "on_epoch is a number": (lambda: vitrail.train("digits", on_epoch=5), "`on_epoch`"),
    "serve a number": (lambda: vitrail.serve(5), "`model`"),
    "serve on many processes": (lambda: vitrail.serve("x", workers=10**30), "`workers`"),
    "NUL in a path": (lambda: vitrail.load("a\0b"), "`path`.*NUL"),
    "NUL in the path of an image": (lambda: classifier().predict("a\0b"), "NUL"),
    "half a character in a path": (lambda: vitrail.open_data("\ud800"), "`data`.*half"),
    "a name of 5,000 characters": (lambda: vitrail.compare("x" * 5000, "y"), "`runs`.*too long"),
    "an image of 0 x 0": (lambda: classifier().predict(Image.new("RGB", (0, 0))), "0 x 0"),
}


@pytest.mark.parametrize(("call", "named"), CALLS.values(), ids=CALLS)
def test_a_wrong_argument_is_named(call, named):
    with pytest.raises((TypeError, UserError), match=named):
        call()


def test_numbers_of_numpy_are_numbers():
    one = classifier()
    assert one.index(np.int64(1)) == 1
    assert len(one.predict(BLACK, top=np.int64(1)).top) == 1
    with pytest.raises(UserError, match="no such class"):
        one.index(np.int64(7))
    config = vitrail.preset("S/16", image=np.int64(32), eps=np.float32(0.5))
    assert (type(config.image), type(config.eps)) == (int, float)
    assert vitrail.ViTConfig(image=(np.int64(32), 48)).image == (32, 48)
    assert network().block_indices(np.array([0])) == [0]


def test_a_compiled_model_is_a_model():
    assert suits(SimpleNamespace(_orig_mod=network()), vitrail.ViT)  # as torch.compile wraps it
    assert not suits(SimpleNamespace(), vitrail.ViT)


# ---- signals


MORE_SIGNALS = ["SIGQUIT", "SIGXCPU", "SIGUSR1", "SIGUSR2"]


@pytest.mark.parametrize(
    "name", ["SIGHUP", *(pytest.param(name, marks=pytest.mark.full) for name in MORE_SIGNALS)]
)
def test_a_signal_saves_a_run_and_leaves_no_process(tmp_path, name):
    code = """
import sys
from vitrail.cli.main import main
main(["train", "digits", "--epochs", "100000", "--out", sys.argv[1], "--data.workers", "2",
      "--data.cache-gb", "0", "--data.disk-gb", "0"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.monotonic() + 200
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(getattr(signal, name))
    assert process.wait(30) == 128 + getattr(signal, name)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    time.sleep(0.5)
    alive = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True)
    assert not alive.stdout.split(), "worker processes are left"
