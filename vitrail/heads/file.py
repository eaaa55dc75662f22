"""Heads as skops files, from which only audited types are loaded."""

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vitrail import __version__, files
from vitrail.errors import UserError
from vitrail.heads.features import Features
from vitrail.heads.head import Head
from vitrail.heads.kinds import require_sklearn
from vitrail.heads.knn import Metric, NearestNeighbours

HEAD_FILE = "head.skops"
FORMAT = 2
# A file may decompress to MAX_RATIO times its size plus ALLOWANCE bytes. The allowance is for
# forests of many classes: most of their values are zero, and compress far better than 100 to 1.
MAX_RATIO, ALLOWANCE = 100, 1 << 30

ALLOWED_LOADERS = {  # of skops; without those that import functions or bind methods
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
VALIDATED_TYPES = (  # skops trusts none of these; `check_estimator` validates their content
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.tree._tree.Tree",
    "vitrail.heads.knn.NearestNeighbours",
)
ALLOWED_TYPES = set(VALIDATED_TYPES) | {
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


def serialise_head(head: Head) -> bytes:
    """The content of a head's file; raises if the head could not be loaded again."""
    require_sklearn()
    import sklearn
    from skops.io import dumps

    table = {
        "format": FORMAT,
        "versions": {"vitrail": __version__, "scikit-learn": sklearn.__version__},
        "kind": head.kind,
        "estimator": head.estimator,
        "classes": list(head.classes),
        "features": head.features.kind,
        "layers": list(head.features.layers),
        "width": head.width,
        "weights_hash": head.weights_hash,
        "preprocess": dict(head.preprocess),
        "data": dict(head.data),
        "temperature": head.temperature,
        "labelling": None
        if head.labelling is None
        else {name: list(values) for name, values in head.labelling.items()},
    }
    try:
        content: bytes = dumps(table, compression=zipfile.ZIP_DEFLATED)
        unknown = find_untrusted_types(content)
    except Exception as error:  # a third-party estimator may raise anything in skops
        raise UserError(f"a head of kind {head.kind} cannot be saved: {error!r:.200}") from error
    if unknown:
        raise UserError(
            f"a head of kind {head.kind} cannot be saved safely: it contains "
            f"{', '.join(unknown[:3])}, which is not among the audited types; "
            f"choose a kind that `vitrail head` lists"
        )
    return content


def write_head_file(path: str | Path, head: Head) -> None:
    files.write_file(path, serialise_head(head))


def read_head_file(path: str | Path) -> Head:
    """The head in a file, or in the file `head.skops` of a folder."""
    path = files.expand_user(path)
    path = path / HEAD_FILE if path.is_dir() else path
    files.check_regular(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the head {path}: {error.strerror}; `vitrail head MODEL DATA` creates one"
        ) from error
    return deserialise_head(content, str(path))


def deserialise_head(content: bytes, name: str) -> Head:
    """The head in a file's content; `name` is the file's, for errors."""
    require_sklearn()
    try:
        unknown = find_untrusted_types(content)
    except Exception as error:  # a file from an unknown origin may raise anything
        raise damaged_head_error(name, error) from error
    if unknown:
        raise UserError(
            f"{name} contains {', '.join(unknown[:3])}, which is not among the types that are "
            f"safe to load; nothing was loaded, use a head created by `vitrail head`"
        )
    try:
        return build_head(content, name)
    except UserError:
        raise
    except Exception as error:
        raise damaged_head_error(name, error) from error


def damaged_head_error(name: str, error: Exception) -> UserError:
    return UserError(
        f"{name} is not a readable head: {type(error).__name__} {str(error)[:120]}; "
        f"remove it and create it again with `vitrail head MODEL DATA`"
    )


def find_untrusted_types(content: bytes) -> list[str]:
    """Types and loaders in the file that are not allowed, read without building any object."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        total = sum(info.file_size for info in archive.infolist())
        if total > MAX_RATIO * len(content) + ALLOWANCE:
            raise ValueError(f"{len(content):,} bytes would decompress to {total:,}")
        if (bad := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {bad} is wrong")
        schema = json.loads(archive.read("schema.json"))
    untrusted = set()
    for node in walk_schema(schema):
        if "__loader__" in node and node["__loader__"] not in ALLOWED_LOADERS:
            untrusted.add(str(node["__loader__"]))
        if "__class__" in node or "__module__" in node:
            kind = f"{node.get('__module__')}.{node.get('__class__')}"
            if kind not in ALLOWED_TYPES and kind != "builtins.NoneType":
                untrusted.add(kind)
    return sorted(untrusted)


def walk_schema(tree: Any) -> Iterator[dict[str, Any]]:
    """Every dictionary in a tree of JSON."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


def build_head(content: bytes, name: str) -> Head:
    """Loads a file whose types are trusted, and validates its arrays and a trial prediction."""
    import sklearn
    from skops.io import loads

    with warnings.catch_warnings(action="ignore"):  # a version mismatch is reported below
        table = loads(content, trusted=list(VALIDATED_TYPES))
    if table["format"] != FORMAT:
        raise UserError(
            f"{name} has format {table['format']}, this version reads {FORMAT}; "
            f"create it again with `vitrail head`"
        )
    version = table["versions"]["scikit-learn"]
    if version.split(".")[:2] != sklearn.__version__.split(".")[:2]:
        log.warning(
            f"{name} was created with scikit-learn {version}; {sklearn.__version__} is installed"
        )
    head = Head(
        kind=str(table["kind"]),
        estimator=table["estimator"],
        classes=tuple(table["classes"]),
        features=Features(kind=table["features"], layers=tuple(table["layers"])),
        width=int(table["width"]),
        weights_hash=str(table["weights_hash"]),
        preprocess=table["preprocess"],
        data=table["data"],
        temperature=table["temperature"],
        labelling=table.get("labelling"),
    )
    if isinstance(head.estimator, list) is not isinstance(head.labelling, dict):
        raise ValueError("it has several labels without their thresholds, or the reverse")
    check_estimator(head.estimator, head.width)
    logits = head.logits(np.zeros((1, head.width), np.float32))
    if logits.shape != (1, len(head.classes)) or not np.isfinite(logits).all():
        raise ValueError("its logits have the wrong shape, or are not finite")
    return head


def check_estimator(estimator: Any, width: int) -> None:
    """Validates every index that compiled code would follow unchecked."""
    from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor
    from sklearn.svm import SVC
    from sklearn.tree._tree import Tree

    for part in walk_objects(estimator):
        if isinstance(part, Tree):
            check_tree(part.children_left, part.children_right, part.feature, part.n_features)
            if part.n_features > width:
                raise ValueError("a tree reads more features than there are")
        elif isinstance(part, TreePredictor):
            check_predictor(part.nodes, width)
        elif isinstance(part, SVC):
            check_svm(part)
        elif isinstance(part, NearestNeighbours):
            if not 1 <= part.k <= len(part.rows_) or part.metric not in get_args(Metric):
                raise ValueError(f"k {part.k!r} or metric {part.metric!r} is invalid")
            if part.rows_.shape != (len(part.labels_), width):
                raise ValueError("rows and labels have different lengths")


def walk_objects(root: Any) -> Iterator[Any]:
    """Every object that is reachable from `root` through attributes and containers, once."""
    pending, visited = [root], set()
    while pending:
        part = pending.pop()
        if id(part) in visited or isinstance(part, str | bytes | int | float | None):
            continue
        visited.add(id(part))
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
    """Children must exist and come after their parent, so that every descent ends in a leaf."""
    index = np.arange(len(left))
    leaf = left == -1
    valid = [(child > index) & (child < len(left)) for child in (left, right)]
    known = (feature >= 0) & (feature < features)
    if not (leaf | (valid[0] & valid[1] & known)).all() or not (right[leaf] == -1).all():
        raise ValueError("a tree has an index out of range")


def check_predictor(nodes: Any, width: int) -> None:
    """Like `check_tree`, for gradient boosting, whose trees must not split on categories."""
    index, leaf = np.arange(len(nodes)), nodes["is_leaf"] != 0
    left, right = nodes["left"].astype(np.int64), nodes["right"].astype(np.int64)
    valid = [(child > index) & (child < len(nodes)) for child in (left, right)]
    known = (nodes["feature_idx"] >= 0) & (nodes["feature_idx"] < width)
    if (nodes["is_categorical"] != 0).any():
        raise ValueError("a tree splits on categories, but features are numbers")
    if not len(nodes) or not (leaf | (valid[0] & valid[1] & known)).all():
        raise ValueError("a tree has an index out of range")


def check_svm(svm: Any) -> None:
    """The arrays of a support vector machine must have consistent shapes."""
    vectors, classes = len(svm.support_vectors_), len(svm.classes_)
    pairs = classes * (classes - 1) // 2
    consistent = (
        svm._n_support.shape == (classes,)
        and (svm._n_support >= 0).all()
        and int(svm._n_support.sum()) == vectors == len(svm.support_)
        and svm._dual_coef_.shape == (classes - 1, vectors)
        and svm._intercept_.shape == (pairs,)
        and svm.kernel in ("linear", "rbf", "poly", "sigmoid")
        and not svm._sparse
    )
    if not consistent:
        raise ValueError("the arrays of a support vector machine have inconsistent shapes")
