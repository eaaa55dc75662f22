"""The perceptual hash survives small changes, and all similar hashes are found."""

import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from tests.data.fakes import photo
from vitrail.audit.perceptual_hash import MAX_DISTANCE, group_similar, hash_image
from vitrail.data.image import load_image

CHANGES = {
    "saved again": lambda image: jpeg(image, 30),
    "a quarter of the size": lambda image: image.reduce(4),
    "grey": lambda image: image.convert("L"),
    "squeezed": lambda image: image.resize((256, 256)),
    "cut a little": lambda image: image.crop((2, 2, image.width - 2, image.height - 2)),
}


def jpeg(image, quality):
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream)


def distance(one, other):
    return bin(hash_image(one) ^ hash_image(other)).count("1")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_copy_has_a_similar_hash(change):
    image = Image.fromarray(photo(0, 240, 320))
    assert distance(image, change(image)) <= MAX_DISTANCE


def test_different_images_have_different_hashes():
    images = [Image.fromarray(photo(seed)) for seed in range(40)]
    assert min(distance(one, other) for one, other in combinations(images, 2)) > MAX_DISTANCE


def test_photos_are_distinguished_and_found_again(shared):
    files = sorted((shared / "data" / "imagenet-val-300").glob("*.jpg"))[:60]
    images = [Image.fromarray(load_image(file)) for file in files]
    assert min(distance(one, other) for one, other in combinations(images, 2)) > MAX_DISTANCE
    assert max(distance(image, jpeg(image.reduce(4), 75)) for image in images) <= MAX_DISTANCE


@pytest.mark.parametrize(
    "pixels",
    [
        np.full((50, 50), 90, np.uint8),
        np.linspace(0, 255, 64 * 64).astype(np.uint8).reshape(64, 64),  # a smooth ramp
    ],
    ids=["one colour", "a ramp"],
)
def test_an_image_without_detail_has_no_hash(pixels):
    assert hash_image(Image.fromarray(pixels)) is None


def brute(hashes):
    """The same groups, by comparing all with all."""
    group = list(range(len(hashes)))
    for a, b in combinations(range(len(hashes)), 2):
        if bin(hashes[a] ^ hashes[b]).count("1") <= MAX_DISTANCE:
            old, new = group[b], group[a]
            group = [new if number == old else number for number in group]
    return group


def partition(numbers):
    found = {}
    for place, number in enumerate(numbers):
        found.setdefault(int(number), set()).add(place)
    return sorted(map(sorted, found.values()))


def test_the_search_finds_what_comparing_all_with_all_finds():
    random = np.random.default_rng(0)
    hashes = [int(number) for number in random.integers(0, 2**64, 60, dtype=np.uint64)]
    for _ in range(60):  # neighbours, some of them of neighbours, some just too far
        bits = random.choice(64, size=random.integers(0, 12), replace=False)
        hashes.append(hashes[random.integers(len(hashes))] ^ sum(1 << int(bit) for bit in bits))
    assert partition(group_similar(np.array(hashes, np.uint64))) == partition(brute(hashes))


@pytest.mark.parametrize(("bits", "same"), [(MAX_DISTANCE, True), (MAX_DISTANCE + 1, False)])
def test_the_limit_is_exact_wherever_the_bits_are(bits, same):
    random = np.random.default_rng(1)
    for _ in range(50):
        flips = sum(1 << int(bit) for bit in random.choice(64, size=bits, replace=False))
        one, other = group_similar(np.array([12345, 12345 ^ flips], np.uint64))
        assert bool(one == other) is same


def test_no_hashes_give_no_groups():
    assert len(group_similar(np.zeros(0, np.uint64))) == 0
