"""The built-in data sets: their classes and sizes, local folders and downloads.

A comment beside each checksum names the page or library that publishes it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitrail.data.sources.places import data_folder

DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
IMAGENETTE = {  # github.com/fastai/imagenette
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
IMAGENET10 = {  # the ten of Chang et al., Deep Adaptive Image Clustering, 2017
    "n02056570": "king penguin",
    "n02085936": "Maltese dog",
    "n02128757": "snow leopard",
    "n02690373": "airliner",
    "n02692877": "airship",
    "n03095699": "container ship",
    "n04254680": "soccer ball",
    "n04285008": "sports car",
    "n04467665": "trailer truck",
    "n07747607": "orange",
}


@dataclass(frozen=True, kw_only=True)
class Download:
    url: str
    size: int  # bytes
    md5: str  # detects damage; https protects against tampering

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A built-in data set, described without opening it."""

    classes: tuple[str, ...]
    train: int  # images in the official training split, from which "val" is taken
    test: int
    image: int | None  # pixels of the (short) side; None if it varies
    channels: int
    verified: bool = False  # whether the authors tried the download; the packaged digits need none
    folders: tuple[str, ...] = ()  # where to look for it below VITRAIL_DATA
    archives: tuple[str, ...] = ()  # official archives to look for there too
    downloads: tuple[Download, ...] = ()


def list_mnist_downloads(root: str, sizes: str, sums: str) -> tuple[Download, ...]:
    names = [
        f"{part}-{kind}-ubyte.gz" for part in MNIST_PARTS for kind in ("images-idx3", "labels-idx1")
    ]
    return tuple(
        Download(url=f"{root}/{name}", size=int(size), md5=md5)
        for name, size, md5 in zip(names, sizes.split(), sums.split(), strict=True)
    )


MNIST_PARTS = ("train", "t10k")  # the names of its training and test files
DATASETS = {
    "digits": DatasetSpec(classes=DIGITS, train=1596, test=201, image=8, channels=1, verified=True),
    "mnist": DatasetSpec(
        classes=DIGITS,
        train=60_000,
        test=10_000,
        image=28,
        channels=1,
        folders=("mnist", "mnist/raw", "mnist/MNIST/raw", "MNIST/raw"),
        downloads=list_mnist_downloads(  # URL and checksums: torchvision/datasets/mnist.py
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "9912422 28881 1648877 4542",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
            "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": DatasetSpec(
        classes=FASHION,
        train=60_000,
        test=10_000,
        image=28,
        channels=1,
        folders=("fashion-mnist", "fashion-mnist/raw", "FashionMNIST/raw"),
        downloads=list_mnist_downloads(  # checksums: github.com/zalandoresearch/fashion-mnist
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            "26421880 29515 4422102 5148",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
            "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "cifar10": DatasetSpec(
        classes=CIFAR10,
        train=50_000,
        test=10_000,
        image=32,
        channels=3,
        folders=("cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-bin"),
        archives=("cifar-10-binary.tar.gz",),
        downloads=(  # checksum: www.cs.toronto.edu/~kriz/cifar.html
            Download(
                url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                size=170_052_171,
                md5="c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
    ),
    "cifar100": DatasetSpec(
        classes=tuple(CIFAR100.split()),
        train=50_000,
        test=10_000,
        image=32,
        channels=3,
        folders=("cifar100/cifar-100-binary", "cifar100", "cifar-100-binary"),
        archives=("cifar-100-binary.tar.gz",),
        downloads=(  # checksum: as above
            Download(
                url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                size=168_513_733,
                md5="03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
    ),
    "imagenette": DatasetSpec(
        classes=tuple(IMAGENETTE.values()),
        train=9469,
        test=3925,
        image=320,
        channels=3,
        folders=(
            "imagenette",
            *(
                f"{top}imagenette2{end}"
                for top in ("imagenette/", "")
                for end in ("-320", "", "-160")
            ),
        ),
        archives=("imagenette2-320.tgz", "imagenette2.tgz", "imagenette2-160.tgz"),
        downloads=(  # checksum: torchvision/datasets/imagenette.py
            Download(
                url="https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz",
                size=341_663_724,
                md5="3df6f0d01a2c9592104656642f5e78a3",
            ),
        ),
    ),
    "imagenet10": DatasetSpec(
        classes=tuple(IMAGENET10.values()),
        train=13_000,
        test=500,
        image=None,
        channels=3,
        folders=("imagenet10", "imagenet", "ILSVRC2012", "imagenet/ILSVRC/Data/CLS-LOC"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A built-in data set: its size, and whether it is on this machine.

    >>> digits = vitrail.datasets()[0]
    >>> digits.classes, digits.train, digits.test, digits.image
    (10, 1596, 201, 8)
    """

    name: str
    classes: int
    train: int  # images in the official training split
    test: int  # images in the official test split
    image: int | None  # pixels of the (short) side; None if it varies
    channels: int
    present: bool  # whether it can be opened without a download
    verified: bool  # whether the authors tried the download; the packaged digits need none

    def to_dict(self) -> dict[str, Any]:
        """The entry of `vitrail datasets --json`.

        >>> vitrail.datasets()[0].to_dict()["name"]
        'digits'
        """
        return asdict(self)


def datasets() -> list[DatasetInfo]:
    """The built-in data sets, and which of them are present on this machine.

    >>> [info.name for info in vitrail.datasets() if info.present and info.verified]
    ['digits']
    """
    return [
        DatasetInfo(
            name=name,
            classes=len(spec.classes),
            train=spec.train,
            test=spec.test,
            image=spec.image,
            channels=spec.channels,
            present=is_present(name),
            verified=spec.verified,
        )
        for name, spec in DATASETS.items()
    ]


def find_dataset(name: str) -> Path | None:
    """The folder or archive below VITRAIL_DATA with the data set; None if there is none."""
    root, spec = data_folder(), DATASETS[name]
    for folder in spec.folders:
        if all(find_variant(root / folder, file) for file in required_files(name)):
            return root / folder
    archives = (root / folder / archive for folder in (name, "") for archive in spec.archives)
    return next((archive for archive in archives if archive.is_file()), None)


def is_present(name: str) -> bool:
    """Whether a built-in data set can be opened without a download."""
    return name == "digits" or find_dataset(name) is not None


def required_files(name: str) -> list[str]:
    """The files that the folder of a data set must contain."""
    if "mnist" in name:
        return [
            f"{part}-{kind}-ubyte"
            for part in MNIST_PARTS
            for kind in ("images-idx3", "labels-idx1")
        ]
    if name == "cifar10":
        return [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    if name == "cifar100":
        return ["train.bin", "test.bin"]
    wnids = IMAGENETTE if name == "imagenette" else IMAGENET10
    return [f"{part}/{wnid}/" for part in ("train", "val") for wnid in wnids]


def find_variant(folder: Path, name: str) -> Path | None:
    """A file or folder by its official name; MNIST's also compressed, or with ".idx" for "-idx"."""
    names = [name]
    if "-idx" in name:
        names = [name, f"{name}.gz", dotted := name.replace("-idx", ".idx"), f"{dotted}.gz"]
    return next((folder / other for other in names if (folder / other).exists()), None)
