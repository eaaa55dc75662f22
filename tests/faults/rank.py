"""One process of a torchrun, to which something happens: rank.py HAPPENINGS ARGUMENTS.

HAPPENINGS is JSON, a list of [attempt, rank, step, signal]: the process of that rank sends itself
the signal after that step. A checkpoint is saved every ten steps, and no report is made.
"""

import json
import os
import signal
import sys

from vitrail.cli.main import main
from vitrail.run import finish, plan
from vitrail.run.drive import Driver

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def happen(steps: dict[int, str]) -> None:
    record = Driver.record_step

    def recording(self, step):
        record(self, step)
        if step.number % 10 == 0:
            self.save()
        if step.number in steps:
            os.kill(os.getpid(), signal.Signals[steps[step.number]])

    Driver.record_step = recording


if __name__ == "__main__":
    plan.TRIAL = 0.0
    finish.make_report = lambda folder, loader, terminal: None
    with open(f"{os.environ['PIDS']}/{RANK}-{ATTEMPT}", "w") as file:
        file.write(str(os.getpid()))
    all_of_them = json.loads(sys.argv[1])
    happen({step: name for *who, step, name in all_of_them if who == [ATTEMPT, RANK]})
    main(sys.argv[2:])
