"""The table of head kinds: a description, an estimator and its hyper-parameter grid for each.

Free of torch, NumPy and scikit-learn until an estimator is built, so that help is instant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from vitrail.errors import UserError

FOREST_BYTES = 5e8  # memory for the trees of a forest: every node holds a float64 for each class
MIN_TREES, MAX_TREES = 20, 200
BOOSTING_TREES = 3000  # in all, roughly: each iteration grows one tree per class
MIN_ROUNDS, MAX_ROUNDS = 10, 200  # boosting iterations
BOOSTING_COMPONENTS = 64  # principal components: more are slow and gain little accuracy
MAX_KERNEL_IMAGES = 10_000  # training time of a kernel SVM is at least quadratic in them
NEIGHBOURS = 5  # k of k-NN without cross-validation, as in scikit-learn

ParameterGrid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """The size of a training set, from which some kinds choose their parameters."""

    images: int
    width: int  # number of features
    classes: int
    smallest_class: int  # images of the class that has the fewest


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """One kind of head."""

    description: str
    build: Callable[[TrainingSize], Any]  # an unfitted estimator with its default parameters
    grid: ParameterGrid = field(default_factory=dict)  # for cross-validation; the first wins ties
    min_shots: int = 1  # training images of each class that the estimator needs
    max_images: int | None = None  # training images it is fitted on, at most; None: all


def build_scaled(estimator: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), estimator)


def build_logistic(size: TrainingSize) -> Any:
    from sklearn.linear_model import LogisticRegression

    return build_scaled(LogisticRegression(C=0.1, max_iter=300, tol=1e-3))


def build_linear_svm(size: TrainingSize) -> Any:
    from sklearn.svm import LinearSVC

    return build_scaled(LinearSVC(C=0.01, random_state=0, tol=1e-3))


def build_rbf_svm(size: TrainingSize) -> Any:
    from sklearn.svm import SVC

    return build_scaled(SVC(C=3.0, cache_size=500))


def build_knn(size: TrainingSize) -> Any:
    from vitrail.heads.knn import NearestNeighbours

    per_class = max(1, size.images // size.classes)
    return NearestNeighbours(k=min(NEIGHBOURS, per_class), metric="cosine")


def count_trees(size: TrainingSize) -> int:
    """As many trees as `FOREST_BYTES` hold, if each is fully grown."""
    nodes = 2 * size.images
    trees = FOREST_BYTES / (8 * nodes * size.classes)
    return int(min(max(trees, MIN_TREES), MAX_TREES))


def build_random_forest(size: TrainingSize) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(count_trees(size), random_state=0, n_jobs=-1)


def build_extra_trees(size: TrainingSize) -> Any:
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(count_trees(size), random_state=0, n_jobs=-1)


def build_boosting(size: TrainingSize) -> Any:
    from sklearn.decomposition import PCA
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.pipeline import make_pipeline

    rounds = int(min(max(BOOSTING_TREES / max(1, size.classes), MIN_ROUNDS), MAX_ROUNDS))
    # early stopping holds out a stratified tenth, here two or more images per class on average
    early_stopping = size.images >= 20 * size.classes and size.smallest_class >= 2
    model = HistGradientBoostingClassifier(
        max_iter=rounds,
        max_leaf_nodes=15,
        min_samples_leaf=min(max(size.images // (5 * size.classes), 1), 20),
        early_stopping=early_stopping,
        n_iter_no_change=10,
        random_state=0,
    )
    components = max(1, min(BOOSTING_COMPONENTS, size.width, size.images // 2))
    return make_pipeline(PCA(components, random_state=0), model)


def build_lda(size: TrainingSize) -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    return LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3)


def build_nearest_mean(size: TrainingSize) -> Any:
    from sklearn.neighbors import NearestCentroid
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    return Pipeline([("scale", StandardScaler()), ("mean", NearestCentroid())])


def build_mlp(size: TrainingSize) -> Any:
    from sklearn.neural_network import MLPClassifier

    return build_scaled(MLPClassifier((256,), alpha=1e-2, max_iter=60, random_state=0))


KINDS = {
    "logistic": HeadKind(
        description="logistic regression on standardised features: the linear probe",
        build=build_logistic,
        grid={"logisticregression__C": (0.1, 0.01, 0.001, 1.0)},
    ),
    "linear-svm": HeadKind(
        description="linear support vector machine, one versus rest",
        build=build_linear_svm,
        grid={"linearsvc__C": (0.01, 0.001, 0.1)},
    ),
    "rbf-svm": HeadKind(
        description="support vector machine with a Gaussian (RBF) kernel",
        build=build_rbf_svm,
        max_images=MAX_KERNEL_IMAGES,
        grid={"svc__C": (3.0, 1.0, 10.0)},
    ),
    "knn": HeadKind(description="majority vote of the k nearest training images", build=build_knn),
    "random-forest": HeadKind(
        description="random forest: decision trees on bootstrap samples and random features",
        build=build_random_forest,
        grid={"min_samples_leaf": (1, 3)},
    ),
    "extra-trees": HeadKind(
        description="extremely randomised trees: a forest with random split thresholds",
        build=build_extra_trees,
        grid={"min_samples_leaf": (1, 3)},
    ),
    "boosting": HeadKind(
        description="gradient-boosted trees on principal components, with early stopping",
        build=build_boosting,
    ),
    "lda": HeadKind(
        description="linear discriminant analysis with a shrunk covariance",
        build=build_lda,
        min_shots=2,
        grid={"shrinkage": (0.3, 0.1, 0.03, "auto")},
    ),
    "nearest-mean": HeadKind(
        description="nearest class mean (nearest centroid) of standardised features",
        build=build_nearest_mean,
        min_shots=2,
        grid={"mean__shrink_threshold": (None, 0.2)},
    ),
    "mlp": HeadKind(
        description="multi-layer perceptron with one hidden layer",
        build=build_mlp,
        grid={"mlpclassifier__alpha": (1e-2, 1.0)},
    ),
}
DEFAULT_KIND = "logistic"


def find_kind(name: str) -> HeadKind:
    """The kind of that name; an unknown name is an error that suggests the closest one."""
    if name not in KINDS:
        close = get_close_matches(name.lower().replace("_", "-"), KINDS, n=1, cutoff=0)
        raise UserError(
            f"unknown head {name!r}; the nearest is {close[0]}, all are {', '.join(KINDS)}"
        )
    return KINDS[name]


def require_sklearn() -> None:
    """Raises a UserError if scikit-learn or skops is not installed."""
    try:
        import sklearn  # noqa: F401
        import skops  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"heads need {error.name}, which is not installed; pip install 'vitrail[heads]'"
        ) from error
