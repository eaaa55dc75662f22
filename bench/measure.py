"""Interleaved rounds, and what they say: medians, spreads, ratios, and whether to believe them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

TURN = 0.1  # seconds: a shorter task is called several times in a row, and the mean counts
FEWEST = 8  # rounds of a case, however long they take
RESOLUTION = 0.05  # two halves of a run may differ by that much, and no more


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case."""

    median: float  # seconds
    best: float  # seconds of its fastest round: a second witness on a busy machine
    ratio: float  # its time over ours, round by round: above 1 it is slower than we are
    spread: float  # of the ratio, from quartile to quartile, within each half of the rounds
    halves: tuple[float, float]  # the ratio in the first and in the second half of the rounds

    @property
    def steady(self) -> bool:
        """Whether both halves agree within the spread, and within what we want to tell apart."""
        return abs(self.halves[0] - self.halves[1]) <= min(self.spread, RESOLUTION)


def interleave(
    tasks: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    tick: Callable[[float], object] = lambda share: None,
) -> dict[str, list[float]]:
    """Seconds of a call of each task, once per round, each round in another order.

    Ends after that many rounds or seconds, whichever comes first, but not before `FEWEST` rounds.
    """
    calls = {name: warm_up(task) for name, task in tasks.items()}
    times: dict[str, list[float]] = {name: [] for name in tasks}
    order, luck, start = list(tasks), random.Random(0), perf_counter()
    for done in range(rounds):
        share = max(done / rounds, min(done / FEWEST, (perf_counter() - start) / seconds))
        tick(share)
        if share >= 1:
            break
        luck.shuffle(order)
        for name in order:
            times[name].append(time(tasks[name], calls[name]))
    return times


def warm_up(task: Callable[[], object]) -> int:
    """Calls the task twice, and says how many calls fill a turn."""
    task()
    return max(1, round(TURN / time(task, 1)))


def time(task: Callable[[], object], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        task()
    return (perf_counter() - start) / calls


def compare(times: Mapping[str, Sequence[float]], ours: str = "vitrail") -> dict[str, Row]:
    """Each contender against ours. Ratios are taken within a round: what slows one slows all."""
    rows = {}
    for name, seconds in times.items():
        ratios = [theirs / own for theirs, own in zip(seconds, times[ours], strict=True)]
        middle = len(ratios) // 2
        halves = ratios[:middle], ratios[middle:]
        rows[name] = Row(
            median=median(seconds),
            best=min(seconds),
            ratio=median(ratios),
            spread=(between_quartiles(halves[0]) + between_quartiles(halves[1])) / 2,
            halves=(median(halves[0]), median(halves[1])),
        )
    return rows


def between_quartiles(numbers: Sequence[float]) -> float:
    low, _, high = quantiles(numbers, n=4)
    return high - low
