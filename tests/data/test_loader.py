"""Batches: identical for any workers, cache, start and rank; every image exactly once."""

import multiprocessing.heap
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.fakes import Deadly, Fake, arrays, encoded, photo, photos
from vitrail.data import augment
from vitrail.data.config import AUGMENT_PRESETS, DataConfig, Preprocess
from vitrail.data.image import load_image
from vitrail.data.loader import Batch, Loader
from vitrail.data.order import count_repeats, epoch_order
from vitrail.data.preprocess import preprocess
from vitrail.data.reading import memory, workers
from vitrail.errors import OutOfResources, UserError

LARGE, SMALL = Preprocess(size=72, crop=0.9), Preprocess(size=16)
STRONG = DataConfig(augment=AUGMENT_PRESETS["strong"], workers=0)
UNCACHED = {"cache_gb": 0, "disk_gb": 0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files() -> Fake:
    return Fake(photos())


def first(count: int, source: Fake, view: Preprocess, config: DataConfig, **how) -> list[Batch]:
    start = how.pop("start", 0)
    how = {"batch": 8, "seed": 5} | how
    return list(islice(Loader(source, view, config, **how).training(start), count))


def same(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a.images, b.images)
        and torch.equal(a.targets, b.targets)
        and np.array_equal(a.items, b.items)
        and (a.step, a.epoch) == (b.step, b.epoch)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("view", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("where", [{}, UNCACHED, {"cache_gb": 0}], ids=["memory", "none", "file"])
def test_workers_and_cache_change_no_bit(files, view, workers, where):
    plain = first(7, files, view, replace(STRONG, **UNCACHED))
    assert same(first(7, files, view, replace(STRONG, workers=workers, **where)), plain)


def test_augmentation_that_depends_on_the_worker_would_be_noticed(files, monkeypatch):
    plain, sample = first(3, files, LARGE, STRONG), augment.sample_uniforms
    monkeypatch.setattr(
        augment, "sample_uniforms", lambda seed, *key: sample(seed + os.getpid(), *key)
    )
    assert not same(first(3, files, LARGE, replace(STRONG, workers=2)), plain)


@pytest.mark.parametrize("start", [1, 3, 4, 11])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_anywhere_gives_what_would_have_come(files, start, workers):
    config = replace(STRONG, workers=workers)
    whole = first(14, files, LARGE, config)
    assert same(first(14 - start, files, LARGE, config, start=start), whole[start:])


def test_a_wrong_start_would_be_noticed(files):
    whole = first(6, files, LARGE, STRONG)
    assert not same(first(3, files, LARGE, STRONG, start=0), whole[3:])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_see_the_batches_of_one(world):
    source = Fake(arrays())
    config = DataConfig(augment=replace(AUGMENT_PRESETS["strong"], mixup=0, cutmix=0), workers=0)
    whole = first(8, source, SMALL, config)
    parts = [first(8, source, SMALL, config, rank=rank, world_size=world) for rank in range(world)]
    for one, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([share.images for share in shares]), one.images)
        assert np.array_equal(np.concatenate([share.items for share in shares]), one.items)


def test_an_epoch_shows_each_image_at_most_once_and_the_next_in_another_order():
    source = Fake(arrays())
    loader = Loader(source, SMALL, STRONG, batch=8)
    batches = list(islice(loader.training(), 2 * loader.steps))
    epochs = [[b for b in batches if b.epoch == epoch] for epoch in (0, 1)]
    seen = [np.concatenate([b.items for b in epoch]) for epoch in epochs]
    train = np.flatnonzero(source.splits == "train")
    assert all(len(set(s)) == len(s) == len(train) // 8 * 8 and set(s) <= set(train) for s in seen)
    assert not np.array_equal(*seen)


def test_labels_belong_to_the_items():
    source = Fake(arrays())
    for batch in first(5, source, SMALL, DataConfig()):
        assert np.array_equal(batch.labels, source.labels[batch.items])
        assert batch.targets is batch.labels


def test_without_augmentation_a_batch_is_the_preprocessed_images():
    source = Fake(arrays())
    for batch in first(3, source, SMALL, DataConfig()):
        theirs = [preprocess(SMALL, source.contents[item]) for item in batch.items]
        assert torch.equal(batch.images, torch.stack(theirs))


@pytest.mark.parametrize("view", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("config", [{}, {"workers": 2}, {"workers": 2, **UNCACHED}])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_evaluation_sees_what_preprocess_makes_each_image_once(files, view, config, split):
    loader = Loader(files, view, DataConfig(**config), batch=5)
    batches = list(loader.evaluation(split))
    items = np.concatenate([batch.items for batch in batches])
    assert np.array_equal(items, np.flatnonzero(files.splits == split))
    theirs = [preprocess(view, load_image(files.contents[item])) for item in items]
    assert torch.equal(torch.cat([batch.images for batch in batches]), torch.stack(theirs))


@pytest.mark.parametrize("where", [{}, UNCACHED], ids=["memory", "none"])
def test_an_empty_split_has_no_batches(where):
    source = Fake(arrays())
    source.splits = np.full(60, "train")
    assert not list(Loader(source, SMALL, DataConfig(**where)).evaluation("val"))


def test_evaluation_on_two_ranks_counts_each_image_once(files):
    loaders = [
        Loader(files, SMALL, DataConfig(), batch=4, rank=rank, world_size=2) for rank in (0, 1)
    ]
    items = [b.items for loader in loaders for b in loader.evaluation("train")]
    assert np.array_equal(np.sort(np.concatenate(items)), np.flatnonzero(files.splits == "train"))


def test_evaluation_of_some_images_takes_them_evenly(files):
    loader = Loader(files, SMALL, DataConfig(workers=0), batch=2)
    whole, some = (
        np.concatenate([batch.items for batch in loader.evaluation("train", limit=limit)])
        for limit in (None, 5)
    )
    assert len(some) == 5 and (some[0], some[-1]) == (whole[0], whole[-1])
    assert set(some) <= set(whole) and np.ptp(np.diff(np.searchsorted(whole, some))) <= 1


def test_evaluation_between_training_steps_changes_nothing(files):
    loader = Loader(files, LARGE, replace(STRONG, workers=2), batch=8, seed=5)
    training, batches = loader.training(), []
    for _ in range(5):
        batches.append(next(training))
        list(loader.evaluation("val"))
    assert same(batches, first(5, files, LARGE, STRONG))


def test_the_global_random_state_does_not_change(files):
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1]
    first(5, files, LARGE, replace(STRONG, workers=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_the_number_of_threads_does_not_change():
    before = torch.get_num_threads()
    for _ in Loader(Fake(arrays()), SMALL, STRONG, batch=8).evaluation("train"):
        assert torch.get_num_threads() == before
    first(2, Fake(arrays()), SMALL, STRONG)
    assert torch.get_num_threads() == before


def test_another_seed_gives_other_images_in_another_order():
    source = Fake(arrays())
    ours, theirs = (first(1, source, SMALL, STRONG, seed=seed)[0] for seed in (1, 2))
    assert not np.array_equal(ours.items, theirs.items)


def test_an_image_looks_different_in_the_next_epoch():
    source = Fake([arrays(1)[0]] * 60)
    loader = Loader(source, SMALL, DataConfig(augment=AUGMENT_PRESETS["digits"]), batch=40)
    one, two = islice(loader.training(), 2)
    assert not torch.equal(one.images, two.images)
    assert len(one.images.unique(dim=0)) > 30


def test_balanced_epochs_show_every_class_equally_often():
    labels = np.array([0] * 900 + [1] * 90 + [2] * 10)
    chosen = epoch_order(labels, seed=0, epoch=0, balanced=True)
    assert len(chosen) == 1000
    assert sorted(np.bincount(labels[chosen])) == [333, 333, 334]
    assert np.bincount(chosen)[-10:].min() >= 33  # the rare ones take turns
    assert not np.array_equal(chosen, epoch_order(labels, seed=0, epoch=1, balanced=True))


def test_a_repeated_image_is_augmented_anew():
    source = Fake(arrays(30))
    source.labels = np.where(np.arange(30) == 0, 0, 1)
    source.classes = ("rare", "common")
    config = DataConfig(augment=AUGMENT_PRESETS["digits"], balanced=True)
    (batch,) = first(1, source, SMALL, config, batch=20)
    rare = batch.images[batch.labels == 0]
    assert len(rare) >= 8 and len(rare.unique(dim=0)) == len(rare)


def test_repeats_counts_earlier_ones():
    assert count_repeats(np.array([5, 3, 5, 5, 2, 3])).tolist() == [0, 0, 1, 2, 0, 1]


def test_a_grey_source_makes_grey_batches():
    view = Preprocess(size=8, channels=1)
    source = Fake(arrays(side=8, channels=1))
    batch = first(1, source, view, DataConfig(augment=AUGMENT_PRESETS["digits"]))[0]
    assert batch.images.shape == (8, 1, 8, 8)


def test_fewer_images_than_a_batch_are_an_error():
    with pytest.raises(UserError, match="training images are fewer than one batch of 128"):
        first(1, Fake(arrays(20)), SMALL, DataConfig(), batch=128)


def test_a_batch_that_leaves_a_rank_without_images_is_an_error():
    with pytest.raises(UserError, match="a batch of 2 leaves some of 3 processes without"):
        Loader(Fake(arrays()), SMALL, batch=2, world_size=3)


def broken_files() -> Fake:
    contents = photos()
    contents[3] = contents[3][:300]
    contents[8] = b"no image"
    contents[9] = b""
    contents[13] = contents[13][:-700]
    return Fake(contents)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_broken_files_of_a_set_that_fits_are_named_at_once(workers):
    with pytest.raises(UserError) as error:
        Loader(broken_files(), LARGE, DataConfig(workers=workers)).prepare()
    assert "4 images cannot be read" in str(error.value)
    for name in ("class 0/3.jpg", "class 2/8.jpg", "class 0/9.jpg", "class 1/13.jpg"):
        assert f"{name}: " in str(error.value)


def test_of_many_broken_files_twenty_are_named_and_the_rest_is_counted():
    with pytest.raises(UserError) as error:
        Loader(Fake([b"no image"] * 50), LARGE, DataConfig(workers=0)).prepare()
    assert str(error.value).startswith("50 images cannot be read: class ")
    assert str(error.value).count("not an image") == 20
    assert "; and 30 more, which `vitrail check DATA --json` lists; repair" in str(error.value)


def test_a_second_call_raises_the_same_error():
    loader = Loader(broken_files(), LARGE, DataConfig(workers=0))
    for _ in range(2):
        with pytest.raises(UserError, match="4 images cannot be read"):
            loader.prepare()


def test_a_train_split_for_evaluation_only_is_decoded_once(files, monkeypatch):
    loader = Loader(files, LARGE, DataConfig(workers=0), batch=8)
    loader.prepare("train", training=False)
    monkeypatch.setattr(Fake, "__getitem__", lambda *_: pytest.fail("read again"))
    assert sum(len(batch.items) for batch in loader.evaluation("train")) == 28


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_that_does_not_fit_stops_at_the_first_broken_file(workers):
    config = DataConfig(workers=workers, **UNCACHED)
    training = Loader(broken_files(), LARGE, config, batch=4).training()
    with pytest.raises(UserError, match=r"^class \d/(3|13|8)\.jpg: "):
        list(islice(training, 7))


@pytest.mark.parametrize("where", [{}, UNCACHED, {"cache_gb": 0}], ids=["memory", "none", "file"])
def test_broken_files_are_skipped_and_counted_on_request(where, caplog):
    source = broken_files()
    loader = Loader(source, LARGE, DataConfig(skip_broken=True, workers=2, **where), batch=4)
    loader.prepare()
    batches = list(islice(loader.training(), loader.steps))
    items = np.concatenate([batch.items for batch in batches])
    assert sorted(loader.broken) == [3, 8, 9, 13] and not set(items) & {3, 8, 9, 13}
    assert all(np.array_equal(b.labels, source.labels[b.items]) for b in batches)
    assert "skipped 4 of 40 images" in caplog.text


@pytest.mark.parametrize("where", [{}, UNCACHED], ids=["memory", "none"])
def test_a_dead_worker_is_reported_with_its_file(where):
    source = Deadly(photos(60))
    source.victim = int(np.flatnonzero(source.splits == "train")[17])
    loader = Loader(source, LARGE, DataConfig(workers=2, **where), batch=8)
    name = source.ids[source.victim]
    with pytest.raises(UserError, match=f"was killed by SIGKILL while reading {name}"):
        list(islice(loader.training(), loader.steps))


@pytest.mark.parametrize("where", [{}, UNCACHED], ids=["memory", "none"])
def test_a_worker_reports_exhausted_resources_as_such(where):
    class Starved(Fake):
        def __getitem__(self, index):
            raise OutOfResources("cannot be read: too many open files")

    source = Starved(photos(40))
    loader = Loader(source, LARGE, DataConfig(workers=2, **where), batch=8)
    with pytest.raises(
        OutOfResources, match=r"^class 0/\d+.jpg: cannot be read: too many open files$"
    ):
        next(loader.training())


def test_a_bug_in_a_worker_keeps_its_traceback(files, monkeypatch):
    monkeypatch.setattr(augment, "random_crop", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        first(1, files, LARGE, replace(STRONG, workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_ends_at_the_given_step(files, workers):
    config = replace(STRONG, workers=workers)
    training = Loader(files, LARGE, config, batch=8, seed=5).training(1, 3)
    assert same(list(islice(training, 5)), first(2, files, LARGE, STRONG, start=1))


def test_closing_the_iterator_ends_its_workers(files):
    training = Loader(files, LARGE, replace(STRONG, workers=2), batch=8).training()
    next(training)
    assert len(multiprocessing.active_children()) == 2
    training.close()
    assert not multiprocessing.active_children()


KILLED = """
import os, signal, sys
from itertools import islice
from tests.data.fakes import Fake, photos
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.loader import Loader
import multiprocessing

loader = Loader(Fake(photos()), Preprocess(size=72), DataConfig(workers=2), batch=8)
for batch in loader.training():
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    orphans = [int(pid) for pid in done.stdout.split()]
    assert len(orphans) == 2, done.stderr
    end = time.monotonic() + 10
    while any(alive(pid) for pid in orphans) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in orphans)


ENDS = """
from tests.data.fakes import Fake, photos
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.loader import Loader

batches = Loader(Fake(photos()), Preprocess(size=72), DataConfig(workers=2), batch=8).training()
print(next(batches).step)
"""


@pytest.mark.slow
def test_a_script_may_end_amid_an_epoch():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, UNCACHED], ids=["cached", "none"])
def test_without_fork_proc_affinity_and_shared_memory_batches_are_the_same(
    files, monkeypatch, where
):
    forked = first(3, files, LARGE, replace(STRONG, workers=1, **where))
    monkeypatch.delattr(os, "fork")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(memory, "MEMINFO", Path("/nowhere"))
    monkeypatch.setattr(memory, "CGROUP", Path("/nowhere"))
    monkeypatch.setattr(multiprocessing.heap.Arena, "_dir_candidates", [])  # /dev/shm
    assert workers.start_method() == "spawn"
    assert same(first(3, files, LARGE, replace(STRONG, workers=1, **where)), forked)


def test_png_and_odd_sizes_come_through():
    contents = [encoded(photo(k, 20 + 9 * k, 200 - 9 * k), "PNG") for k in range(20)]
    batches = first(2, Fake(contents), LARGE, replace(STRONG, workers=2), batch=4)
    assert all(batch.images.shape == (4, 3, 72, 72) for batch in batches)


def slow_at_first(task, slot, note):
    """The first task takes until three others are done."""
    folder, number = task
    deadline = time.monotonic() + 10
    while number == 0 and len(list(folder.iterdir())) < 3:
        assert time.monotonic() < deadline, "nobody did more than a fair share"
        time.sleep(0.01)
    (folder / str(number)).touch()
    return number


def test_a_fast_worker_does_more_tasks_and_results_stay_in_order(tmp_path):
    tasks = [(tmp_path, number) for number in range(12)]
    replies = [reply for _, reply, _ in workers.prefetch(slow_at_first, tasks, workers=2)]
    assert replies == list(range(12))
