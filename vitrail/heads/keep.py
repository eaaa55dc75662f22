"""A head as a file: skops, and only types whose every byte was thought about are loaded."""

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail import __version__, files
from vitrail.errors import UserError
from vitrail.heads.features import Features
from vitrail.heads.head import Head
from vitrail.heads.kinds import needed
from vitrail.heads.knn import NearestNeighbours

FILE = "head.skops"
FORMAT = 1
# A file may unpack to so many times its bytes, and these more: a forest is mostly zeros.
UNPACKED, SPARE = 100, 1 << 30

LOADERS = {  # how skops may build something; functions and methods are not among them
    "CachedNode",
    "DictNode",
    "JsonNode",
    "ListNode",
    "LossNode",
    "NdArrayNode",
    "ObjectNode",
    "RandomGeneratorNode",
    "RandomStateNode",
    "TreeNode",
    "TupleNode",
    "TypeNode",
}
CHECKED = (  # skops trusts none of these; here `check_content` looks into them
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.tree._tree.Tree",
    "vitrail.heads.knn.NearestNeighbours",
)
TYPES = set(CHECKED) | {
    "builtins.bool",
    "builtins.dict",
    "builtins.float",
    "builtins.int",
    "builtins.list",
    "builtins.str",
    "builtins.tuple",
    "numpy.bool",
    "numpy.float32",
    "numpy.float64",
    "numpy.int32",
    "numpy.int64",
    "numpy.ndarray",
    "numpy.random._generator.Generator",
    "numpy.random.mtrand.RandomState",
    "numpy.uint64",
    "sklearn._loss._loss.CyHalfBinomialLoss",
    "sklearn._loss._loss.CyHalfMultinomialLoss",
    "sklearn._loss.link.Interval",
    "sklearn._loss.link.LogitLink",
    "sklearn._loss.link.MultinomialLogit",
    "sklearn._loss.loss.HalfBinomialLoss",
    "sklearn._loss.loss.HalfMultinomialLoss",
    "sklearn.decomposition._pca.PCA",
    "sklearn.discriminant_analysis.LinearDiscriminantAnalysis",
    "sklearn.discriminant_analysis.QuadraticDiscriminantAnalysis",
    "sklearn.ensemble._forest.ExtraTreesClassifier",
    "sklearn.ensemble._forest.RandomForestClassifier",
    "sklearn.ensemble._hist_gradient_boosting.binning._BinMapper",
    "sklearn.ensemble._hist_gradient_boosting.gradient_boosting.HistGradientBoostingClassifier",
    "sklearn.linear_model._logistic.LogisticRegression",
    "sklearn.linear_model._ridge.RidgeClassifier",
    "sklearn.naive_bayes.GaussianNB",
    "sklearn.neighbors._nearest_centroid.NearestCentroid",
    "sklearn.neural_network._multilayer_perceptron.MLPClassifier",
    "sklearn.pipeline.Pipeline",
    "sklearn.preprocessing._data.Normalizer",
    "sklearn.preprocessing._data.StandardScaler",
    "sklearn.preprocessing._label.LabelBinarizer",
    "sklearn.preprocessing._label.LabelEncoder",
    "sklearn.svm._classes.LinearSVC",
    "sklearn.svm._classes.SVC",
    "sklearn.tree._classes.DecisionTreeClassifier",
    "sklearn.tree._classes.ExtraTreeClassifier",
}

log = logging.getLogger(__name__)


def pack(head: Head) -> bytes:
    """The file's content; a head that could not be loaded again is refused."""
    needed()
    import sklearn
    from skops.io import dumps

    plain = {
        "format": FORMAT,
        "versions": {"vitrail": __version__, "scikit-learn": sklearn.__version__},
        "kind": head.kind,
        "estimator": head.estimator,
        "classes": list(head.classes),
        "what": head.features.what,
        "layers": list(head.features.layers),
        "width": head.width,
        "weights": head.weights,
        "view": dict(head.view),
        "data": dict(head.data),
        "temperature": head.temperature,
    }
    try:
        content: bytes = dumps(plain, compression=zipfile.ZIP_DEFLATED)
        odd = strangers(content)
    except Exception as error:  # whatever skops meets in a foreign estimator
        raise UserError(f"a head of kind {head.kind} cannot be kept: {error!r:.200}") from error
    if odd:
        raise UserError(
            f"a head of kind {head.kind} cannot be kept safely: it holds {', '.join(odd[:3])}, "
            f"which no one has audited; take one of `vitrail head --all`"
        )
    return content


def save(path: str | Path, head: Head) -> None:
    files.write(path, pack(head))


def load(path: str | Path) -> Head:
    """The head in a file, or in the file of that name in a folder."""
    path = files.expanded(path)
    path = path / FILE if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the head {path}: {error.strerror}; `vitrail head MODEL DATA` makes one"
        ) from error
    return unpack(content, str(path))


def unpack(content: bytes, name: str) -> Head:
    needed()
    try:
        odd = strangers(content)
    except Exception as error:  # a file from anywhere may break the reader anywhere
        raise damaged(name, error) from error
    if odd:
        raise UserError(
            f"{name} holds {', '.join(odd[:3])}, which is not among the types that are safe to "
            f"load; nothing of it was loaded"
        )
    try:
        return rebuild(content, name)
    except UserError:
        raise
    except Exception as error:
        raise damaged(name, error) from error


def damaged(name: str, error: Exception) -> UserError:
    return UserError(
        f"{name} is no readable head: {type(error).__name__} {str(error)[:120]}; "
        f"remove it, and `vitrail head MODEL DATA` makes it again"
    )


def strangers(content: bytes) -> list[str]:
    """Types and loaders in the file that are not on the lists, found before anything is built."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        total = sum(info.file_size for info in archive.infolist())
        if total > UNPACKED * len(content) + SPARE:
            raise ValueError(f"{len(content):,} bytes would unpack to {total:,}")
        if (bad := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {bad} is wrong")
        schema = json.loads(archive.read("schema.json"))
    found = set()
    for node in nodes(schema):
        if "__loader__" in node and node["__loader__"] not in LOADERS:
            found.add(str(node["__loader__"]))
        if "__class__" in node or "__module__" in node:
            kind = f"{node.get('__module__')}.{node.get('__class__')}"
            if kind not in TYPES and kind != "builtins.NoneType":
                found.add(kind)
    return sorted(found)


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


def rebuild(content: bytes, name: str) -> Head:
    import sklearn
    from skops.io import loads

    with warnings.catch_warnings(action="ignore"):  # another version is told below, in one line
        plain = loads(content, trusted=list(CHECKED))
    if plain["format"] != FORMAT:
        raise UserError(
            f"{name} has format {plain['format']}, this version reads {FORMAT}; "
            f"use the version of vitrail that wrote it"
        )
    made = plain["versions"]["scikit-learn"]
    if made.split(".")[:2] != sklearn.__version__.split(".")[:2]:
        log.warning(f"{name} was made with scikit-learn {made}, this is {sklearn.__version__}")
    head = Head(
        kind=str(plain["kind"]),
        estimator=plain["estimator"],
        classes=tuple(plain["classes"]),
        features=Features(what=plain["what"], layers=tuple(plain["layers"])),
        width=int(plain["width"]),
        weights=str(plain["weights"]),
        view=plain["view"],
        data=plain["data"],
        temperature=plain["temperature"],
    )
    check_content(head.estimator, head.width)
    tried = head.scores(np.zeros((1, head.width), np.float32))
    if tried.shape != (1, len(head.classes)) or not np.isfinite(tried).all():
        raise ValueError("it does not answer")
    return head


def check_content(estimator: Any, width: int) -> None:
    """Follows every index that compiled code would follow unchecked."""
    from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor
    from sklearn.svm import SVC
    from sklearn.tree._tree import Tree

    for part in parts(estimator):
        if isinstance(part, Tree):
            check_tree(part.children_left, part.children_right, part.feature, part.n_features)
            if part.n_features > width:
                raise ValueError("a tree asks for more features than there are")
        elif isinstance(part, TreePredictor):
            check_predictor(part.nodes, width)
        elif isinstance(part, SVC):
            check_svm(part)
        elif isinstance(part, NearestNeighbours):
            if not 1 <= part.k <= len(part.rows_) or part.metric not in ("euclid", "cosine"):
                raise ValueError(f"k is {part.k!r}, the distance {part.metric!r}")
            if part.rows_.shape != (len(part.labels_), width):
                raise ValueError("rows and labels do not fit each other")


def parts(estimator: Any) -> Iterator[Any]:
    """Everything that the estimator is made of, once."""
    pending, seen = [estimator], set()
    while pending:
        part = pending.pop()
        if id(part) in seen or isinstance(part, str | bytes | int | float | None):
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, list | tuple):
            pending.extend(part)
        elif isinstance(part, np.ndarray):
            if part.dtype == object:
                pending.extend(part.ravel().tolist())
        elif hasattr(part, "__dict__"):
            pending.extend(vars(part).values())


def check_tree(left: Any, right: Any, feature: Any, features: int) -> None:
    """Children come after their parent and exist; so every way down ends."""
    numbers = np.arange(len(left))
    leaf = left == -1
    below = [(side > numbers) & (side < len(left)) for side in (left, right)]
    asked = (feature >= 0) & (feature < features)
    if not (leaf | (below[0] & below[1] & asked)).all() or not (right[leaf] == -1).all():
        raise ValueError("a tree points outside of itself")


def check_predictor(nodes: Any, width: int) -> None:
    numbers, leaf = np.arange(len(nodes)), nodes["is_leaf"] != 0
    left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
    below = [(side > numbers) & (side < len(nodes)) for side in (left, right)]
    asked = (nodes["feature_idx"] >= 0) & (nodes["feature_idx"] < width)
    if (nodes["is_categorical"] != 0).any():
        raise ValueError("a tree asks for categories, and features have none")
    if not len(nodes) or not (leaf | (below[0] & below[1] & asked)).all():
        raise ValueError("a tree points outside of itself")


def check_svm(svm: Any) -> None:
    vectors, classes = len(svm.support_vectors_), len(svm.classes_)
    pairs = classes * (classes - 1) // 2
    fits = (
        svm._n_support.shape == (classes,)
        and (svm._n_support >= 0).all()
        and int(svm._n_support.sum()) == vectors == len(svm.support_)
        and svm._dual_coef_.shape == (classes - 1, vectors)
        and svm._intercept_.shape == (pairs,)
        and svm.kernel in ("linear", "rbf", "poly", "sigmoid")
        and not svm._sparse
    )
    if not fits:
        raise ValueError("the numbers of a support vector machine do not fit each other")
