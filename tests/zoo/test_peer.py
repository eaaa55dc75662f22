"""`vitrail convert MODEL --check PEER`: the outputs of both libraries, side by side."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.zoo.test_towers import write
from vitrail.cli.main import main
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo import peer
from vitrail.zoo.file import save_model

BENCH = Path(__file__).resolve().parents[2] / ".venv-bench" / "bin" / "python"


def model_file(folder):
    torch.manual_seed(0)
    config = ViTConfig(image=32, patch=8, width=48, depth=2, heads=3, classes=5)
    path = folder / "model.safetensors"
    model = ViT(config)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    save_model(path, model, {"classes": list("abcde")})
    return path


def test_the_largest_difference_is_measured(tmp_path, monkeypatch, capsys):
    class Fake:
        __version__ = "1.2"

    def run(library, name, folder, x, loaded):
        assert (folder / "config.json").is_file()
        with torch.inference_mode():
            return loaded.model(x) + torch.tensor([0.0, 0, 0.25, 0, 0])

    monkeypatch.setattr(peer, "import_peer", lambda name: Fake)
    monkeypatch.setattr(peer, "run_peer", run)
    main(["convert", str(model_file(tmp_path)), "--check", "timm", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["largest_difference"] == pytest.approx(0.25, abs=1e-5)
    assert found["output"] == "logits"


def test_a_missing_peer_says_what_to_install(monkeypatch, tmp_path):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(peer, "import_module", missing)
    with pytest.raises(UserError, match="transformers is not installed: pip install transformers"):
        peer.check_with_peer(model_file(tmp_path), "transformers")


def test_convert_needs_a_target_or_a_peer(tmp_path):
    with pytest.raises(SystemExit, match="give --to and --out, or --check"):
        main(["convert", str(model_file(tmp_path))])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers-siglip-vision", "transformers-dinov3"])
def test_transformers_agrees(name, tmp_path):
    if not BENCH.is_file():
        pytest.skip("needs `make .venv-bench/.installed`")
    # the module declares the operators without which torchvision, and so transformers, fails
    code = "import sys, tests.parity.make_fixtures, vitrail.cli.main as cli; cli.main(sys.argv[1:])"
    command = [BENCH, "-c", code, "convert", write(name, tmp_path / "in")]
    command += ["--check", "transformers", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCH.parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["largest_difference"] < 1e-5
