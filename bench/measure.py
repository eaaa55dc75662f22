"""Interleaved rounds in two repeats, and what they say: medians, spreads, ratios, and doubts."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, quantiles
from time import perf_counter
from typing import Any

REPEATS = 2  # of all cases of a bench, one after the other: minutes lie between those of a case
TURN = 0.1  # seconds: a shorter task is called several times in a row, and the mean counts
NOTICED, RESOLUTION = 0.01, 0.05  # ratios that differ by less are equal, by more are not

Task = Callable[[], object]
Clock = Callable[[int], float]  # calls a task so many times, says the seconds of one
Tick = Callable[[float, str], object]  # told the share that is done, and what is done now
Times = Mapping[str, Sequence[float]]  # of each contender, one number for each round


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a case may take in each repeat."""

    rounds: int
    seconds: float
    fewest: int = 2  # rounds, however long they take


@dataclass(frozen=True, kw_only=True)
class Case:
    label: str
    unit: str  # of the numbers on paper: ms, s, MB, images/s
    measure: Callable[[Budget], Times]
    images: int = 0  # in one call of a task; for images/s


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case."""

    median: float  # seconds or megabytes
    best: float  # in its fastest round: a second witness on a busy machine
    ratio: float  # its number over ours, round by round: above 1 it is slower or larger than ours
    spread: float  # of the ratio, from quartile to quartile, within a repeat
    repeats: tuple[float, ...]  # the ratio in each repeat

    @property
    def steady(self) -> bool:
        """Whether the repeats agree within the spread, and within what we want to tell apart."""
        apart = max(self.repeats) - min(self.repeats)
        allowed = max(self.spread, NOTICED * self.ratio)
        return apart <= min(allowed, RESOLUTION * self.ratio)


def measure(cases: Sequence[Case], budget: Budget, tick: Tick) -> list[dict[str, Any]]:
    """Goes through all cases, and then through all of them again."""
    found: dict[str, list[Times]] = {case.label: [] for case in cases}
    for repeat in range(REPEATS):
        for number, case in enumerate(cases):
            done = (repeat * len(cases) + number) / (REPEATS * len(cases))
            tick(done, case.label)
            found[case.label].append(case.measure(budget))
    tick(1.0, "")
    return [
        {
            "label": case.label,
            "unit": case.unit,
            "images": case.images,
            "rows": {name: plain(row) for name, row in compare(found[case.label]).items()},
        }
        for case in cases
    ]


def plain(row: Row) -> dict[str, Any]:
    return asdict(row) | {"steady": row.steady}


def interleave(clocks: Mapping[str, Clock], budget: Budget) -> dict[str, list[float]]:
    """Seconds of a call of each task, once per round, each round in another order.

    Ends after the budget's rounds or seconds, whichever come first, but has its fewest rounds.
    """
    start = perf_counter()
    calls = {name: warm_up(clock) for name, clock in clocks.items()}
    times: dict[str, list[float]] = {name: [] for name in clocks}
    order, luck = list(clocks), random.Random(0)
    for done in range(budget.rounds):
        if done >= budget.fewest and perf_counter() - start >= budget.seconds:
            break
        luck.shuffle(order)
        for name in order:
            times[name].append(clocks[name](calls[name]))
    return times


def warm_up(clock: Clock) -> int:
    """Calls the task, twice if it is quick, and says how many calls fill a turn."""
    if clock(1) >= TURN:
        return 1
    return max(1, round(TURN / clock(1)))


def seconds_of(task: Task, calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        task()
    return (perf_counter() - start) / calls


def compare(repeats: Sequence[Times], ours: str = "vitrail") -> dict[str, Row]:
    """Each contender against ours. Ratios are taken within a round: what slows one slows all."""
    rows = {}
    for name in repeats[0]:
        ratios = [
            [theirs / own for theirs, own in zip(times[name], times[ours], strict=True)]
            for times in repeats
        ]
        numbers = [number for times in repeats for number in times[name]]
        rows[name] = Row(
            median=median(numbers),
            best=min(numbers),
            ratio=median(ratio for repeat in ratios for ratio in repeat),
            spread=mean(between_quartiles(repeat) for repeat in ratios),
            repeats=tuple(median(repeat) for repeat in ratios),
        )
    return rows


def between_quartiles(numbers: Sequence[float]) -> float:
    """Of fewer than three numbers, the distance of all."""
    if len(numbers) < 3:
        return max(numbers) - min(numbers)
    low, _, high = quantiles(numbers, n=4)
    return high - low
