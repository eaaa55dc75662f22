"""Interleaved rounds in two repeats, and their statistics: medians, ratios, spread, agreement."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, quantiles
from time import perf_counter
from typing import Any

REPEATS = 2  # passes over all cases, so that minutes separate the measurements of one case
MIN_SECONDS = 0.1  # a shorter task is called several times per round, and the mean counts
SAME_WITHIN = 0.01  # ratios that differ by less, relative to the ratio, always agree
DIFFERENT_BEYOND = 0.05  # ratios that differ by more never agree

Task = Callable[[], object]
Timer = Callable[[int], float]  # runs a task this many times; returns the seconds of one call
OnProgress = Callable[[float, str], object]  # takes the fraction done and the current activity
Times = Mapping[str, Sequence[float]]  # for each contender, one number per round


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of a case in each repeat."""

    rounds: int
    seconds: float
    min_rounds: int = 2  # even if they take longer than `seconds`


@dataclass(frozen=True, kw_only=True)
class Case:
    label: str
    unit: str  # in the table: ms, s, MB, x, images/s
    measure: Callable[[Budget], Times]
    images: int = 0  # per call of a task; for images/s


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case."""

    median: float  # seconds or megabytes
    best: float  # the smallest number of any round: less affected by a busy machine
    ratio: float  # median over rounds of its number / Vitrail's; above 1 is slower or larger
    spread: float  # interquartile range of the ratio, mean over the repeats
    repeats: tuple[float, ...]  # the ratio of each repeat

    @property
    def steady(self) -> bool:
        """Whether the repeats agree within the spread, and within DIFFERENT_BEYOND."""
        difference = max(self.repeats) - min(self.repeats)
        allowed = max(self.spread, SAME_WITHIN * self.ratio)
        return difference <= min(allowed, DIFFERENT_BEYOND * self.ratio)


def measure(cases: Sequence[Case], budget: Budget, progress: OnProgress) -> list[dict[str, Any]]:
    """Measures all cases, then all of them again."""
    times: dict[str, list[Times]] = {case.label: [] for case in cases}
    for repeat in range(REPEATS):
        for number, case in enumerate(cases):
            done = (repeat * len(cases) + number) / (REPEATS * len(cases))
            progress(done, case.label)
            times[case.label].append(case.measure(budget))
    progress(1.0, "")
    return [
        {
            "label": case.label,
            "unit": case.unit,
            "images": case.images,
            "rows": {name: row_to_dict(row) for name, row in compare(times[case.label]).items()},
        }
        for case in cases
    ]


def row_to_dict(row: Row) -> dict[str, Any]:
    return asdict(row) | {"steady": row.steady}


def interleave(timers: Mapping[str, Timer], budget: Budget) -> dict[str, list[float]]:
    """Seconds per call of each task, once per round; every round has a random order.

    Stops after the budget's rounds or seconds, whichever comes first, but not before `min_rounds`.
    """
    start = perf_counter()
    calls = {name: warm_up(timer) for name, timer in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    order, rng = list(timers), random.Random(0)
    for done in range(budget.rounds):
        if done >= budget.min_rounds and perf_counter() - start >= budget.seconds:
            break
        rng.shuffle(order)
        for name in order:
            times[name].append(timers[name](calls[name]))
    return times


def warm_up(timer: Timer) -> int:
    """Runs the task, twice if it is fast; returns how many calls take MIN_SECONDS."""
    if timer(1) >= MIN_SECONDS:
        return 1
    return max(1, round(MIN_SECONDS / timer(1)))


def time_calls(task: Task, calls: int) -> float:
    """Mean seconds per call."""
    start = perf_counter()
    for _ in range(calls):
        task()
    return (perf_counter() - start) / calls


def compare(repeats: Sequence[Times], baseline: str = "vitrail") -> dict[str, Row]:
    """Compares each contender with the baseline.

    Ratios are taken within a round, where the load of the machine is the same for all.
    """
    rows = {}
    for name in repeats[0]:
        ratios = [
            [theirs / own for theirs, own in zip(times[name], times[baseline], strict=True)]
            for times in repeats
        ]
        numbers = [number for times in repeats for number in times[name]]
        rows[name] = Row(
            median=median(numbers),
            best=min(numbers),
            ratio=median(ratio for repeat in ratios for ratio in repeat),
            spread=mean(interquartile_range(repeat) for repeat in ratios),
            repeats=tuple(median(repeat) for repeat in ratios),
        )
    return rows


def interquartile_range(numbers: Sequence[float]) -> float:
    """With fewer than three numbers, the full range."""
    if len(numbers) < 3:
        return max(numbers) - min(numbers)
    low, _, high = quantiles(numbers, n=4)
    return high - low
