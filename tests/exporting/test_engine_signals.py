"""A process that has closed an engine still handles signals."""

import subprocess
import sys

import numpy as np

from tests.exporting.models import build_model, preprocess_of
from vitrail.exporting.export import export_model

CODE = """
import gc, os, signal, sys
import numpy as np
from vitrail.exporting.engine import open_engine
engine = open_engine(sys.argv[1])
engine.run(np.zeros([1, *map(int, sys.argv[2:])], np.float32))
del engine
gc.collect()
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_after_openvino_was_closed_is_handled(tmp_path):
    model = build_model("cls")
    path = tmp_path / "a.xml"
    config = model.config
    images = np.zeros((2, config.channels, *config.size), np.uint8)
    names = [str(number) for number in range(config.classes)]
    settings = {"classes": names, "preprocess": preprocess_of(model)}
    export_model(model, path, to="openvino", images=images, **settings)
    shape = map(str, (config.channels, *config.size))
    done = subprocess.run(
        [sys.executable, "-c", CODE, path, *shape], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
