"""The launchers of the page on many machines, on two machines that are processes of one."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.material import make_photos
from tests.training.ranks import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text()
PATIENCE = 600  # seconds
TINY = "--vit.width 32 --vit.depth 1 --vit.heads 1 --train.batch 16 --train.steps 30"
STUBS = {  # in place of Slurm's
    "scontrol": "echo 127.0.0.1\necho 127.0.0.1\n",
    "srun": '"$@" & first=$!\n"$@" && wait $first\n',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"\n',
}

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def shell(tmp_path):
    """Starts a line or script of the page, for one process per machine and a short training."""
    make_photos(tmp_path / "photos")
    (tmp_path / "bin").mkdir()
    for name, code in STUBS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    port = free_port()

    def start(code, **variables):
        code = re.sub(r"--nproc-per-node \d+", "--nproc-per-node 1", code)
        code = code.replace("HOST:29400", f"127.0.0.1:{port}").replace(":29400", f":{port}")
        code = code.replace("train photos", f"train photos {TINY}")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables
        return subprocess.Popen(
            ["bash", "-c", code],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def block(words):
    """The block of the page that contains these words."""
    return next(
        code for code in re.findall(r"```(?:sh|bash)\n(.*?)```", PAGE, re.S) if words in code
    )


def outputs(processes):
    texts = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text[-3000:]
    return texts


def test_one_line_on_each_machine_trains_one_model(shell, tmp_path):
    code = block("--nnodes 2 --nproc-per-node 8 --max-restarts 3")
    outputs([shell(code) for _ in range(2)])
    assert (tmp_path / "runs" / "photos" / "model.safetensors").is_file()


def test_doctor_reports_both_machines(shell):
    code = block("-m vitrail doctor runs") + " --offline"
    texts = outputs([shell(code.replace("\n", "")) for _ in range(2)])
    (report,) = [text for text in texts if "processes:" in text]
    assert "2 processes by gloo" in report and report.count("versions on") == 2


def test_the_slurm_script_trains_and_resumes_when_it_is_requeued(shell, tmp_path):
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    for words in ("steps of 16 images", "is already finished"):
        (text,) = outputs([shell(block("#SBATCH"), **variables)])
        assert words in text, text[-3000:]
    assert (tmp_path / "runs" / "photos-7" / "model.safetensors").is_file()
