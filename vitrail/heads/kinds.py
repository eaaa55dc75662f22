"""The table of heads: what each is, and the few parameters that cross-validation chooses."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.heads.knn import Metric, NearestNeighbours, Search, votes

FOLDS = 3  # parts of the training images, each judged once by a head that did not see it
TRIED = 2000  # training images at most that parameters are chosen on; the head itself sees all
NEIGHBOURS = (5, 1, 10, 20)
METRICS: tuple[Metric, ...] = ("cosine", "euclid")
TREES_ROOM = 5e8  # bytes that a forest may take: its leaves hold a number for each class
ROUNDS_ROOM = 3000  # trees that boosting may grow: one for each class in each round
COMPONENTS = 64  # features that boosting sees: more cost much time and bring little

Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of the training images a head is made for."""

    images: int
    width: int  # features
    classes: int
    rarest: int  # images of the class that has fewest


@dataclass(frozen=True, kw_only=True)
class Kind:
    words: str  # what it does
    make: Callable[[Shape], Any]  # an estimator, with the parameters that few images get
    grid: Grid = field(default_factory=dict)  # of parameters to try, the first ones win ties
    least: int = 1  # training images of each class without which it knows nothing
    most: int | None = None  # training images that it learns from; its time grows with their square


@dataclass(frozen=True, kw_only=True)
class Fitted:
    estimator: Any
    parameters: dict[str, Any]  # that were chosen; `images` where it did not learn from all
    cross_validation: float | None  # accuracy they had; None where nothing was to choose
    search_seconds: float
    fit_seconds: float  # of the head on all training images


def scaled(estimator: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), estimator)


def logistic(shape: Shape) -> Any:
    from sklearn.linear_model import LogisticRegression

    return scaled(LogisticRegression(C=0.1, max_iter=300, tol=1e-3))


def linear_svm(shape: Shape) -> Any:
    from sklearn.svm import LinearSVC

    return scaled(LinearSVC(C=0.01, random_state=0, tol=1e-3))


def rbf_svm(shape: Shape) -> Any:
    from sklearn.svm import SVC

    return scaled(SVC(C=3.0, cache_size=500))


def knn(shape: Shape) -> Any:
    each = max(1, shape.images // shape.classes)
    return NearestNeighbours(k=min(5, each), metric="cosine")


def trees(shape: Shape) -> int:
    """Fewer where there are many images and classes: every node holds a number for each class."""
    nodes = 2 * shape.images
    return int(np.clip(TREES_ROOM / (8 * nodes * shape.classes), 20, 200))


def random_forest(shape: Shape) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(trees(shape), random_state=0, n_jobs=-1)


def extra_trees(shape: Shape) -> Any:
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(trees(shape), random_state=0, n_jobs=-1)


def boosting(shape: Shape) -> Any:
    from sklearn.decomposition import PCA
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.pipeline import make_pipeline

    rounds = int(np.clip(ROUNDS_ROOM / max(1, shape.classes), 10, 200))
    # a tenth of them has two of each class, and none is alone
    stops = shape.images >= 20 * shape.classes and shape.rarest >= 2
    model = HistGradientBoostingClassifier(
        max_iter=rounds,
        max_leaf_nodes=15,
        min_samples_leaf=int(np.clip(shape.images // (5 * shape.classes), 1, 20)),
        early_stopping=stops,
        n_iter_no_change=10,
        random_state=0,
    )
    fewer = min(COMPONENTS, shape.width, shape.images // 2)
    return make_pipeline(PCA(max(1, fewer), random_state=0), model)


def lda(shape: Shape) -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    return LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3)


def nearest_mean(shape: Shape) -> Any:
    from sklearn.neighbors import NearestCentroid
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    return Pipeline([("scale", StandardScaler()), ("mean", NearestCentroid())])


def mlp(shape: Shape) -> Any:
    from sklearn.neural_network import MLPClassifier

    return scaled(MLPClassifier((256,), alpha=1e-2, max_iter=60, random_state=0))


KINDS = {
    "logistic": Kind(
        words="the linear probe: logistic regression on standardised features",
        make=logistic,
        grid={"logisticregression__C": (0.1, 0.01, 0.001, 1.0)},
    ),
    "linear-svm": Kind(
        words="a flat border for each class, as far from the images as it can be",
        make=linear_svm,
        grid={"linearsvc__C": (0.01, 0.001, 0.1)},
    ),
    "rbf-svm": Kind(
        words="a curved border, from distances to chosen images",
        make=rbf_svm,
        most=10_000,
        grid={"svc__C": (3.0, 1.0, 10.0)},
    ),
    "knn": Kind(words="the vote of the nearest training images", make=knn),
    "random-forest": Kind(
        words="the vote of trees, each grown on other images and features",
        make=random_forest,
        grid={"min_samples_leaf": (1, 3)},
    ),
    "extra-trees": Kind(
        words="the same with random borders",
        make=extra_trees,
        grid={"min_samples_leaf": (1, 3)},
    ),
    "boosting": Kind(
        words="trees that mend each other's mistakes; they stop when it helps no more",
        make=boosting,
    ),
    "lda": Kind(
        words="a Gaussian for each class, all of one shape",
        make=lda,
        least=2,
        grid={"shrinkage": (0.3, 0.1, 0.03, "auto")},
    ),
    "nearest-mean": Kind(
        words="the nearest mean of a class",
        make=nearest_mean,
        least=2,
        grid={"mean__shrink_threshold": (None, 0.2)},
    ),
    "mlp": Kind(
        words="a small neural network with one hidden layer",
        make=mlp,
        grid={"mlpclassifier__alpha": (1e-2, 1.0)},
    ),
}


def find(name: str) -> Kind:
    """The kind of that name; an unknown one is an error that names the nearest."""
    if name not in KINDS:
        near = get_close_matches(name.lower().replace("_", "-"), KINDS, n=1, cutoff=0)
        raise UserError(
            f"there is no head {name!r}; the nearest is {near[0]}, all are {', '.join(KINDS)}"
        )
    return KINDS[name]


def fit(name: str, x: NDArray[np.float32], y: NDArray[np.int64], classes: Sequence[str]) -> Fitted:
    """Chooses parameters by cross-validation on the training images, then learns from all.

    A kind that would take hours learns from `most` of them, and says so.
    """
    kind = find(name)
    needed()
    rarest = int(np.bincount(y, minlength=len(classes)).min())
    shape = Shape(images=len(y), width=x.shape[1], classes=len(classes), rarest=rarest)
    start = time.perf_counter()
    some = sample(y, TRIED)
    score: float | None
    with patient():
        if name == "knn":
            parameters, score = best_neighbours(x[some], y[some], len(classes))
            estimator: Any = NearestNeighbours(**parameters)
        else:
            parameters, score = best_parameters(kind, shape, x[some], y[some], classes)
            estimator = kind.make(shape).set_params(**parameters)
        chosen = time.perf_counter()
        told = {key.split("__")[-1]: value for key, value in parameters.items()}
        if kind.most is not None and len(y) > kind.most:
            seen = sample(y, kind.most)
            x, y = x[seen], y[seen]
            told["images"] = len(y)
        estimator.fit(x, y)
    return Fitted(
        estimator=estimator,
        parameters=told,
        cross_validation=score,
        search_seconds=chosen - start,
        fit_seconds=time.perf_counter() - chosen,
    )


def needed() -> None:
    try:
        import sklearn  # noqa: F401
        import skops  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"heads need {error.name}, which is not installed; pip install 'vitrail[heads]'"
        ) from error


def patient() -> "warnings.catch_warnings[None]":
    """The steps of a solver are limited on purpose: that it could have gone on is no news."""
    from sklearn.exceptions import ConvergenceWarning

    return warnings.catch_warnings(action="ignore", category=ConvergenceWarning)


def best_parameters(
    kind: Kind,
    shape: Shape,
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    classes: Sequence[str],
) -> tuple[dict[str, Any], float | None]:
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    if not kind.grid:
        return {}, None
    check_folds(y, classes)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    search = GridSearchCV(
        kind.make(shape), dict(kind.grid), cv=folds, refit=False, error_score="raise"
    )
    search.fit(x, y)
    return search.best_params_, float(search.best_score_)


def check_folds(y: NDArray[np.int64], classes: Sequence[str]) -> None:
    counts = np.bincount(y, minlength=len(classes))
    if (least := int(counts.min())) < FOLDS:
        name = classes[int(counts.argmin())]
        images = "1 training image" if least == 1 else f"{least} training images"
        raise UserError(
            f"class {name!r} has {images}, fewer than the {FOLDS} folds of cross-validation; "
            f"add some, or leave the class out"
        )


def best_neighbours(
    x: NDArray[np.float32], y: NDArray[np.int64], classes: int
) -> tuple[dict[str, Any], float]:
    """Every image is judged by all others: one search gives the answer for every `k`."""
    tried = [k for k in NEIGHBOURS if k < len(x)] or [1]
    scores: dict[tuple[Metric, int], float] = {}
    for metric in METRICS:
        _, near = Search(x, metric)(x, min(max(tried) + 1, len(x)))
        others = without_itself(near)
        for k in tried:
            said = votes(y[others[:, :k]], classes).argmax(axis=1)
            scores[metric, k] = float((said == y).mean())
    metric, k = max(scores, key=lambda pair: scores[pair])
    return {"k": k, "metric": metric}, scores[metric, k]


def without_itself(near: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each row's neighbours without the row; without the last, where many copies hide the row."""
    own = near == np.arange(len(near))[:, None]
    own[~own.any(axis=1), -1] = True
    others: NDArray[np.int64] = near[~own].reshape(len(near), -1)
    return others


def sample(y: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most about so many images, of each class its share but at least one for each fold."""
    if len(y) <= most:
        return np.arange(len(y))
    random = np.random.default_rng(0)
    chosen = []
    for label in np.unique(y):
        mine = random.permutation(np.flatnonzero(y == label))
        chosen.append(mine[: max(FOLDS, round(most * len(mine) / len(y)))])
    return np.sort(np.concatenate(chosen))
