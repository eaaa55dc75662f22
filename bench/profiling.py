"""The time of a training step by kind of operator, measured with torch's profiler."""

import os
from collections.abc import Callable
from time import perf_counter

from torch.profiler import ProfilerActivity, profile

STEPS = 3
GROUPS = {  # substrings of operator names; the first group that matches counts
    "optimizer": ("Optimizer.", "adam", "_foreach_"),
    "matrix products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "conv", "linear"),
    "attention": ("attention", "softmax"),
    "GELU": ("gelu",),
    "norms": ("layer_norm",),
    "copies": ("copy_", "aten::cat", "aten::clone", "contiguous", "aten::stack"),
}
OTHER, PYTHON = "sums and other operators", "Python and autograd"


def profile_task(run: Callable[[], object]) -> dict[str, float]:
    """The fraction of the time in each group; time outside of operators counts as Python."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's start message
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = perf_counter()
        for _ in range(STEPS):
            run()
        elapsed = perf_counter() - start
    fractions = dict.fromkeys([*GROUPS, OTHER, PYTHON], 0.0)
    for event in profiler.key_averages():
        if group := operator_group(event.key):
            fractions[group] += event.self_cpu_time_total / 1e6 / elapsed
    fractions[PYTHON] = max(0.0, 1 - sum(fractions.values()))
    total = sum(fractions.values())
    return {group: fraction / total for group, fraction in fractions.items()}


def operator_group(operator: str) -> str | None:
    """None for events that are not operators, such as the autograd engine's."""
    if operator.startswith("autograd::") or operator.endswith("Backward0"):
        return None
    for group, names in GROUPS.items():
        if any(name in operator for name in names):
            return group
    return OTHER if operator.startswith("aten::") else None
