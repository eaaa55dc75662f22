"""Weights from the hub, served by a local server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.local_hub import Hub, run_hub
from tests.zoo import samples
from vitrail.errors import UserError

NAME = "owner/small"

CODE = """
import json, sys
from vitrail.errors import UserError
from vitrail.zoo.load import load_weights
try:
    loaded = load_weights(sys.argv[1])
    print(json.dumps({"loaded": loaded.report.loaded, "mean": loaded.preprocess.mean}))
except UserError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub(tmp_path) -> Iterator[ThreadingHTTPServer]:
    pytest.importorskip("huggingface_hub", reason="needs vitrail[hub]")
    folder = samples.save("timm-cls", tmp_path / "remote")
    config = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"num_heads": 3},
        "pretrained_cfg": {
            "input_size": [3, 24, 30],
            "mean": [0.1, 0.2, 0.3],
            "std": [1.0, 1.0, 1.0],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    with run_hub(Hub, folder, NAME) as server:
        yield server


def load_in_process(server, cache: Path, name: str, **more: str) -> dict[str, object]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, name], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_a_hub_repository_is_downloaded_once_and_then_cached(tmp_path, hub):
    cache, requests = tmp_path / "cache", hub.RequestHandlerClass.requests
    first = load_in_process(hub, cache, f"hf:{NAME}")
    assert first == {"loaded": len(samples.tensors("timm-cls")), "mean": [0.1, 0.2, 0.3]}
    assert any("GET" in line and "model.safetensors" in line for line in requests)
    requests.clear()
    assert load_in_process(hub, cache, f"hf:{NAME}") == first
    assert requests == []
    assert load_in_process(hub, cache, f"hf:{NAME}", HF_HUB_OFFLINE="1") == first
    assert requests == []


@pytest.mark.slow
def test_offline_mode_sends_no_request(tmp_path, hub):
    result = load_in_process(hub, tmp_path / "empty", f"hf:{NAME}", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in str(result["error"])
    assert hub.RequestHandlerClass.requests == []


@pytest.mark.slow
def test_a_missing_hub_repository_or_file_is_a_user_error(tmp_path, hub):
    result = load_in_process(hub, tmp_path / "cache", "hf:owner/absent")
    assert "the hub has no hf:owner/absent" in str(result["error"])
    result = load_in_process(hub, tmp_path / "cache", "hf:not a name")
    assert "not a valid hub name" in str(result["error"])
    (hub.RequestHandlerClass.folder / "model.safetensors").rename(tmp_path / "elsewhere")
    result = load_in_process(hub, tmp_path / "cache", f"hf:{NAME}")
    assert "none of model.safetensors" in str(result["error"])


def test_an_unreachable_hub_is_a_user_error(monkeypatch):
    package = pytest.importorskip("huggingface_hub", reason="needs vitrail[hub]")
    from vitrail.zoo.hub import fetch_from_hub

    def refuse_connection(*names: str, **more: object) -> str:
        cause = ConnectionError("[Errno 111] Connection refused\nand more")
        raise package.errors.LocalEntryNotFoundError("not there") from cause

    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(package, "hf_hub_download", refuse_connection)
    monkeypatch.setattr(package, "try_to_load_from_cache", lambda *names, **more: None)
    with pytest.raises(UserError, match=r"cannot be downloaded: \[Errno 111\] Connection refused;"):
        fetch_from_hub(NAME)


def test_a_missing_huggingface_hub_names_the_extra_to_install(monkeypatch):
    from vitrail.zoo.hub import fetch_from_hub

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"vitrail\[hub\]"):
        fetch_from_hub(NAME)
