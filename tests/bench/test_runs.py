"""Every benchmark that runs without the peers, on the smallest case."""

import pytest

from bench import engines, inference, knn, load, memory, start_up, step
from bench.measure import Budget
from bench.peers import PEERS
from bench.process import start_process
from bench.profiling import OTHER, PYTHON, operator_group, profile_task

ONCE = Budget(rounds=1, seconds=0.1)
OURS = {"vitrail": PEERS["vitrail"]}


def check_progress(done, activity):
    assert 0 <= done <= 1


@pytest.fixture(autouse=True)
def without_peers(monkeypatch):
    for bench in (inference, step, memory, start_up):
        monkeypatch.setattr(bench, "PEERS", OURS)
    for bench in (inference, start_up):
        monkeypatch.setattr(bench, "RUNTIMES", [])


def test_inference_measures_vitrail_and_the_lower_bound(monkeypatch):
    monkeypatch.setattr(inference, "CASES", [("Pico/4", 2)])
    (case,) = inference.run(ONCE, check_progress)["cases"]
    assert case["label"] == "Pico/4, 32 px, batch 2"
    assert case["rows"]["vitrail"]["ratio"] == 1
    assert 0 < case["rows"]["matmuls"]["ratio"] < 1


@pytest.mark.full
def test_engines_run_an_export_of_the_same_model(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(engines, "CASES", [("Pico/4", 2)])
    monkeypatch.setattr(engines, "EAGER", ("vitrail",))
    monkeypatch.setattr(engines, "FILES", {"onnxruntime": engines.FILES["onnxruntime"]})
    found = engines.run(ONCE, check_progress)
    assert list(found["cases"][0]["rows"]) == ["vitrail", "onnxruntime"]
    assert found["cases"][0]["rows"]["onnxruntime"]["median"] > 0 and "eager" in found["note"]


@pytest.mark.full
def test_step_has_a_profile(monkeypatch):
    monkeypatch.setattr(step, "CASES", [("Pico/4", 4)])
    found = step.run(ONCE, check_progress)
    assert set(found["cases"][0]["rows"]) == {"vitrail", "vitrail masked", "matmuls"}
    profile = found["profiles"][0]["rows"]["vitrail"]
    assert sum(profile.values()) == pytest.approx(1)
    busy = ("matrix products", "attention", "GELU", "norms", "copies", "optimizer", PYTHON)
    assert all(profile[group] > 0 for group in busy)


def test_the_fastest_peer_is_profiled_beside_vitrail(monkeypatch):
    monkeypatch.setattr(step, "PEERS", dict.fromkeys(("vitrail", "slow", "fast")))
    rows = {"vitrail": {"ratio": 1}, "slow": {"ratio": 2}, "fast": {"ratio": 1.1}}
    assert step.select_profiled(rows) == ["vitrail", "fast"]


@pytest.mark.parametrize(
    ("operator", "group"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::gelu_backward", "GELU"),
        ("aten::native_layer_norm", "norms"),
        ("aten::copy_", "copies"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::add_", OTHER),
        ("AddmmBackward0", None),
        ("autograd::engine::evaluate_function: AddmmBackward0", None),
    ],
)
def test_every_operator_has_its_group(operator, group):
    assert operator_group(operator) == group


def test_a_task_without_operators_is_all_python():
    assert profile_task(lambda: sum(range(1000)))[PYTHON] == pytest.approx(1)


@pytest.mark.slow
def test_nearest_neighbours_are_the_same(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(knn, "IMAGES", 300)
    monkeypatch.setattr(knn, "QUERIES", 20)
    found = knn.run(ONCE, check_progress)
    assert found["agreement"] == {"cosine": pytest.approx(1), "euclidean": pytest.approx(1)}
    assert [set(case["rows"]) for case in found["cases"]] == [{"vitrail", "scikit-learn"}] * 2


@pytest.mark.full
def test_memory_and_start_up_are_measured_in_new_processes(monkeypatch):
    monkeypatch.setattr(memory, "CASES", {"step": [("Pico/4", 64), ("Pico/4", 1)]})
    many, one = (case["rows"]["vitrail"] for case in memory.run(ONCE, check_progress)["cases"])
    assert 1 < one["median"] < many["median"] < 500
    assert len(many["repeats"]) == 2
    monkeypatch.setattr(start_up, "MODEL", "Pico/4")
    (case,) = start_up.run(ONCE, check_progress)["cases"]
    assert case["rows"]["vitrail"]["median"] > 0.1


def test_the_error_of_a_failed_process_is_raised():
    with (
        start_process("nothing", "vitrail") as process,
        pytest.raises(RuntimeError, match=r"bench\.nothing"),
    ):
        process.call("prepare", "Pico/4", 1)


@pytest.mark.full
def test_every_layout_is_loaded(monkeypatch):
    monkeypatch.setattr(load, "MODEL", "Ti/16")
    monkeypatch.setattr(load, "OWNERS", dict.fromkeys(load.OWNERS, ()))
    cases = load.run(ONCE, check_progress)["cases"]
    assert len(cases) == 3 * len(load.OWNERS)
    assert all(case["rows"]["vitrail"]["median"] > 0 for case in cases)
