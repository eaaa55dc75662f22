"""Where the time of a training step goes, as torch's profiler sees it."""

import os
from collections.abc import Callable
from time import perf_counter

from torch.profiler import ProfilerActivity, profile

STEPS = 3
GROUPS = {  # what an operator's name may contain; the first group that fits has it
    "optimizer": ("Optimizer.", "adam", "_foreach_"),
    "matrix products": ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "conv", "linear"),
    "attention": ("attention", "softmax"),
    "GELU": ("gelu",),
    "norms": ("layer_norm",),
    "copies": ("copy_", "aten::cat", "aten::clone", "contiguous", "aten::stack"),
}
REST, PYTHON = "sums and the rest", "Python and autograd"


def shares(run: Callable[[], object]) -> dict[str, float]:
    """Parts of 1, by kind of work; what no operator takes is Python's."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell that it starts
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = perf_counter()
        for _ in range(STEPS):
            run()
        whole = perf_counter() - start
    found = dict.fromkeys([*GROUPS, REST, PYTHON], 0.0)
    for event in profiler.key_averages():
        if group := group_of(event.key):
            found[group] += event.self_cpu_time_total / 1e6 / whole
    found[PYTHON] = max(0.0, 1 - sum(found.values()))
    total = sum(found.values())
    return {group: share / total for group, share in found.items()}


def group_of(operator: str) -> str | None:
    """None for what is no operator: the engine that walks backward through the graph."""
    if operator.startswith("autograd::") or operator.endswith("Backward0"):
        return None
    for group, words in GROUPS.items():
        if any(word in operator for word in words):
            return group
    return REST if operator.startswith("aten::") else None
