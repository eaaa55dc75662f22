"""Admission by predicted wait, on a simulated clock: ten times the load that the model can take."""

import heapq
from collections import deque
from itertools import count

import pytest

from vitrail.server.admission import SMOOTHING, Admission, Refusal

SERVICE = 0.02  # simulated seconds per image with both lanes at work
LANES, BATCH, MAX_WAIT = 2, 4, 0.5
BATCH_SECONDS = LANES * BATCH * SERVICE  # one lane has half of the cores


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_admission(seconds=SERVICE):
    admission = Admission(MAX_WAIT, LANES, Clock())
    admission.seconds = seconds
    return admission


def overload(admission, seconds=20.0, times=10, slower=lambda now: 1.0):
    """Arrivals at `times` the rate of the model; (arrival, wait) of those that were accepted."""
    order, waiting, free, accepted = count(), deque(), LANES, []
    events = [(0.0, next(order), None)]  # a batch that is done, or None: an arrival
    while events:
        now, _, batch = heapq.heappop(events)
        admission.clock.now = now
        if batch is not None:
            free += 1
            admission.measure(len(batch))
            for arrival, counted in batch:
                counted.__exit__(None, None, None)
                accepted.append((arrival, now - arrival))
        else:
            if now < seconds:
                heapq.heappush(events, (now + SERVICE / times, next(order), None))
            try:
                admission.admit()
                counted = admission.count_image()
                counted.__enter__()
                waiting.append((now, counted))
            except Refusal:
                pass
        while free and waiting:
            batch = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
            free -= 1
            done = now + len(batch) * LANES * SERVICE * slower(now)
            heapq.heappush(events, (done, next(order), batch))
    return accepted


def percentile(waits, percent):
    return sorted(waits)[int(len(waits) * percent / 100)]


def test_waits_stay_near_the_limit_and_no_throughput_is_lost():
    accepted = overload(make_admission())
    assert len(accepted) * SERVICE / 20 > 0.95
    assert max(wait for _, wait in accepted) < MAX_WAIT + 2 * BATCH_SECONDS
    assert percentile([wait for _, wait in accepted], 50) > MAX_WAIT / 2  # the queue is used


@pytest.mark.parametrize("wrong", [0.25, 4.0])
def test_a_wrong_first_estimate_is_corrected(wrong):
    accepted = overload(make_admission(wrong * SERVICE))
    later = [wait for arrival, wait in accepted if arrival > 5]
    assert len(accepted) * SERVICE / 20 > 0.9
    assert max(later) < MAX_WAIT + 2 * BATCH_SECONDS


def test_a_slower_machine_admits_fewer():
    accepted = overload(make_admission(), slower=lambda now: 1.0 if now < 5 else 3.0)
    later = [wait for arrival, wait in accepted if arrival > 12]
    assert max(later) < MAX_WAIT + 3 * 2 * BATCH_SECONDS
    assert len(later) * 3 * SERVICE / 8 > 0.9


def test_a_second_of_standstill_delays_only_what_was_queued():
    """One batch that takes a second longer than it should; the estimate hardly moves."""
    admission, stall = make_admission(), 1.0 / BATCH_SECONDS
    accepted = overload(admission, slower=lambda now: stall if 10 <= now < 10 + SERVICE else 1.0)
    delayed = [wait for _, wait in accepted if wait > MAX_WAIT + 2 * BATCH_SECONDS]
    assert len(delayed) <= 2 * MAX_WAIT / SERVICE
    assert admission.seconds == pytest.approx(SERVICE, rel=0.1)


def test_a_free_lane_accepts_any_request():
    """Also of a model that needs longer than the limit for one image."""
    admission = make_admission(seconds=2.0)
    with admission.count_image():
        admission.admit()
        with admission.count_image(), pytest.raises(Refusal) as refused:
            admission.admit()
    assert refused.value.retry_after == 4  # 2 x 2 s - 0.5 s, in whole seconds


def test_a_list_of_images_waits_like_one_image():
    """What is ahead of a request decides, not its size; what follows it waits."""
    admission = make_admission()
    counted = [admission.count_image() for _ in range(32)]
    for one in counted[:20]:
        one.__enter__()
    admission.admit()  # 0.4 s
    for one in counted[20:]:
        one.__enter__()
    with pytest.raises(Refusal):
        admission.admit()  # 0.64 s


def test_slow_senders_do_not_count_for_long():
    admission = make_admission()
    admission.clock.now = 100.0
    admission.reading = {object(): 98.0 for _ in range(100)}
    admission.admit()
    admission.reading = {object(): 99.5 for _ in range(100)}
    with pytest.raises(Refusal):
        admission.admit()


def test_one_huge_image_does_not_close_the_server():
    admission = make_admission(seconds=0.01)
    admission.clock.now = 100.0
    admission.measure(1)
    assert admission.seconds == pytest.approx(SMOOTHING * 0.01 + (1 - SMOOTHING) * 0.04)


def test_a_batch_with_all_threads_does_not_change_the_estimate():
    admission = make_admission()
    admission.clock.now = 0.005
    admission.measure(1, alone=True)
    assert admission.seconds == SERVICE and admission.last_done == 0.005


def test_the_wait_is_a_whole_number_of_seconds():
    assert [Refusal(wait).retry_after for wait in (-1, 0.2, 1.2, 1e9)] == [1, 1, 2, 60]
