"""The same parts on a Ray cluster of two nodes, and after the death of whatever can die.

Drivers are commands of their own, as users start them; nodes and workers are real processes.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import vitrail
from tests.batch.conftest import make_model, read, states
from vitrail.batch.ray_engine import (
    check_reachable,
    choose_resources,
    connect_to_ray,
    describe_ray_error,
)
from vitrail.data.open import open_data
from vitrail.errors import UserError

PART = 8  # of the 1797 digits: 225 parts


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'vitrail\[ray\]'"), connect_to_ray():
        pass


def test_workers_have_a_gpu_and_its_share_of_the_cores_or_a_core():
    head, gpus = {"CPU": 64.0}, {"CPU": 96.0, "GPU": 8.0}
    assert choose_resources([head, gpus], "auto") == {"workers": 8, "num_gpus": 1, "num_cpus": 12}
    assert choose_resources([gpus], "cpu") == {"workers": 96, "num_cpus": 1}
    assert choose_resources([{"CPU": 2.0}], "auto") == {"workers": 2, "num_cpus": 1}


def test_a_mistake_in_a_worker_is_one_line():
    class TaskError(UserError):  # Ray's, around ours
        cause = UserError("model on node 1f: another sha256")

    outer = RuntimeError("Traceback ...")
    outer.__cause__ = TaskError("task failed\nTraceback ...")
    assert describe_ray_error(outer) == "model on node 1f: another sha256"
    assert describe_ray_error(RuntimeError("node died\nat 1f")) == "Ray failed: node died"


def test_a_cluster_that_does_not_answer_is_one_line():
    with pytest.raises(UserError, match=r"cannot connect to Ray at 127.0.0.1:1: .*refused"):
        check_reachable("127.0.0.1:1")
    assert check_reachable("local") is None and check_reachable("auto") is None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with a core each."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_BACKEND_LOG_LEVEL": "fatal",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The model, and the parts that one process writes."""
    place = tmp_path_factory.mktemp("local")
    model = make_model(place / "model.safetensors")
    vitrail.features(model, "digits", out=place / "out", part=PART)
    return model, read(place / "out")


def start(model, out):
    command = [sys.executable, "-m", "vitrail", "features", str(model), "digits", "--json"]
    command += ["--out", str(out), "--on", "ray", "--part", str(PART)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return json.loads(out)


def wait_for_parts(process, out, count):
    while len(states(out)) < count:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def find_workers():
    """The processes of this test's cluster that hold a model."""
    import psutil

    below = psutil.Process().children(recursive=True)
    below = [one for one in below if one.status() != psutil.STATUS_ZOMBIE]  # of other tests
    return [one.pid for one in below if "PartTask" in " ".join(one.cmdline())]


def deadly(photos, *, everywhere):
    """Pictures of which the sixth kills a process that reads it: any, or only a worker's."""
    found = open_data(photos, labels="none", split=False)

    class Deadly(type(found)):  # a local class, which Ray sends to its workers
        def __getitem__(self, index):
            import ray

            if index == 5 and (everywhere or ray.get_runtime_context().get_actor_id()):
                os._exit(1)
            return super().__getitem__(index)

    return Deadly(**vars(found))


def check_kept(before, out):
    """All parts that existed are as they were."""
    after = states(out)
    assert before and {name: after[name] for name in before} == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
def test_a_killed_worker_loses_nothing_on_two_nodes(cluster, expected, tmp_path):
    model, table = expected
    process = start(model, tmp_path)
    wait_for_parts(process, tmp_path, 5)
    os.kill(find_workers()[0], signal.SIGKILL)
    before = states(tmp_path)
    result = finish(process)
    assert result["computed"] == result["parts"] > len(before)
    check_kept(before, tmp_path)
    assert read(tmp_path).equals(table)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
def test_an_image_that_crashes_the_decoder_has_a_row_with_an_error(
    cluster, model, photos, tmp_path
):
    source = deadly(photos, everywhere=True)
    result = vitrail.features(model, source, out=tmp_path / "out", on="ray", part=4)
    assert (result.parts, result.errors) == (6, 2)  # a broken one, too
    errors = read(tmp_path / "out")["error"].to_pylist()
    assert errors[5] == "crashes the process that decodes it"
    assert sum(error is not None for error in errors) == 2


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
def test_a_part_that_kills_every_worker_ends_the_job_in_one_line(cluster, model, photos, tmp_path):
    source = deadly(photos, everywhere=False)
    line = r"^5 workers died while computing part-0*1\.parquet; [^\n]*$"
    with pytest.raises(UserError, match=line):
        vitrail.features(model, source, out=tmp_path / "out", on="ray", part=4)
    before = states(tmp_path / "out")
    vitrail.features(
        model, open_data(photos, labels="none", split=False), out=tmp_path / "out", part=4
    )
    check_kept(before, tmp_path / "out")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
def test_a_killed_driver_loses_nothing_and_repeats_nothing(cluster, expected, tmp_path):
    model, table = expected
    with start(model, tmp_path) as process:
        wait_for_parts(process, tmp_path, 5)
        os.kill(process.pid, signal.SIGKILL)
    before = states(tmp_path)
    result = finish(start(model, tmp_path))
    assert result["computed"] <= result["parts"] - len(before)
    check_kept(before, tmp_path)
    assert read(tmp_path).equals(table)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
def test_a_lost_node_loses_nothing(cluster, expected, tmp_path):
    model, table = expected
    third = cluster.add_node(num_cpus=1)
    process = start(model, tmp_path)
    wait_for_parts(process, tmp_path, 5)
    cluster.remove_node(third, allow_graceful=False)
    before = states(tmp_path)
    finish(process)
    check_kept(before, tmp_path)
    assert read(tmp_path).equals(table)
