"""Closed by default: hosts, origins, tokens, the headers of every answer, bad starts."""

import socket

import pytest

import vitrail
from tests.server.conftest import picture
from vitrail.errors import UserError
from vitrail.server.config import ServeConfig, read_token

JPEG = picture()
TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def guarded(start):
    return start(token=TOKEN)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_loopback_names_are_served(server, host):
    assert server.call("/live", host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.x:80"])
def test_other_hosts_are_not(server, host):
    assert server.call("/live", host=host).status == 421


def test_pages_of_other_sites_may_not_send_requests(server):
    assert server.call("/predict", JPEG, origin="https://evil.example").status == 403
    assert server.call("/predict", JPEG, origin="null").status == 403
    assert server.call("/predict", JPEG, origin=f"http://localhost:{server.port}").status == 200


def test_no_answer_allows_another_origin(server):
    answer = server.call("/predict", method="OPTIONS", origin="http://localhost:1")
    assert answer.status == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_answer_has_a_strict_policy(server):
    for path in ("/", "/live", "/nowhere", "/model"):
        headers = server.call(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self';"
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and "server" not in headers


def test_without_the_token_only_page_and_health_answer(guarded):
    for path in ("/model", "/metrics", "/openapi.json", "/v2", "/examples"):
        answer = guarded.call(path)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer x", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN}x"):
        assert guarded.call("/predict", JPEG, authorization=wrong).status == 401
    for path in ("/", "/live", "/ready", "/v2/health/ready"):
        assert guarded.call(path).status == 200
    assert guarded.call("/predict", JPEG, authorization=f"Bearer {TOKEN}").status == 200


def test_tokens_are_compared_in_constant_time(guarded, monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or False)
    guarded.call("/model", authorization="Bearer guess")
    assert compared == [(b"Bearer guess", f"Bearer {TOKEN}".encode())]


def test_a_public_host_needs_a_decision():
    with pytest.raises(UserError, match="reachable from other machines"):
        ServeConfig(host="0.0.0.0")
    ServeConfig(host="0.0.0.0", token=TOKEN)
    ServeConfig(host="0.0.0.0", no_token=True)
    ServeConfig(host="::1")
    assert not ServeConfig(host="0.0.0.0", token=TOKEN).host_names


def test_a_proxy_may_use_its_name(start):
    names = ServeConfig(allowed_hosts=("vit.example",)).host_names
    assert {"vit.example", "localhost"} <= names and "evil.example" not in names


def test_tokens_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("VITRAIL_TOKEN", raising=False)
    assert read_token(None) is None
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    monkeypatch.setenv("VITRAIL_TOKEN", TOKEN[::-1])
    assert read_token(None) == TOKEN[::-1]
    with pytest.raises(UserError, match="not an argument"):
        read_token("secret")
    (tmp_path / "token").write_text("short")
    with pytest.raises(UserError, match="5 characters; give at least 16"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70000}, "port"),
        ({"workers": 0}, "workers"),
        ({"batch": 0}, "batch"),
        ({"max_wait": 0}, "max_wait"),
        ({"max_mb": float("nan")}, "max_mb"),
        ({"examples": -1}, "examples"),
        ({"host": "no.such.host.invalid"}, "not an address"),
        ({"token": TOKEN, "no_token": True}, "exclude each other"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        ServeConfig(**settings)


def test_a_port_that_is_taken_is_one_line(model_file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: address already in use; choose another"):
            vitrail.serve(model_file, port=port)


def test_a_model_that_is_missing_is_one_line(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        vitrail.serve(tmp_path / "nothing", port=0)
