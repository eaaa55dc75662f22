"""`ViTClassifier` and `ViTFeatures` do what scikit-learn expects of estimators."""

import pickle
import warnings

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import validate_data

import vitrail
from vitrail.run.image_list import class_names, hold_out_validation, list_images, make_source

TINY = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "data": {"workers": 0},
}


def tiny(**changes):
    return vitrail.ViTClassifier(**{"epochs": 1, "settings": TINY, "device": "cpu"} | changes)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def digits():
    source = vitrail.open_data("digits")
    return source.pixels[:300, :, :, 0], source.labels[:300]


@pytest.fixture(scope="module")
def fitted(digits):
    return tiny(epochs=15).fit(*digits)


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    """A run folder that a fit left behind."""
    place = tmp_path_factory.mktemp("runs")
    return tiny(epochs=15, runs=place).fit(*digits).run_


def test_it_learns(fitted, digits):
    assert fitted.score(*digits) > 0.5
    assert fitted.classes_.tolist() == list(range(10))


def test_probabilities_are_calibrated_and_in_the_order_of_the_classes(fitted, digits):
    found = fitted.predict_proba(digits[0][:20])
    assert found.shape == (20, 10) and np.allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (fitted.predict(digits[0][:20]) == fitted.classes_[found.argmax(axis=1)]).all()
    assert fitted.classifier_.temperature is not None
    np.testing.assert_array_equal(found, fitted.classifier_.probabilities(list(digits[0][:20])))


def test_labels_may_be_anything(digits):
    names = np.array(["even", "odd"])[digits[1] % 2]
    found = tiny().fit(digits[0], names)
    assert found.classes_.tolist() == ["even", "odd"]
    assert set(found.predict(digits[0][:9])) <= {"even", "odd"}


def test_paths_pil_images_and_arrays_are_the_same(fitted, digits, tmp_path):
    arrays = digits[0][:5]
    for number, pixels in enumerate(arrays):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    expected = fitted.predict_proba(arrays)
    for same in (
        arrays[:, :, :, None],
        list(arrays),
        paths,
        list(map(str, paths)),
        np.array(list(map(str, paths))),
        np.array(paths, object),
        np.array(paths, object)[:, None],
        [Image.open(path) for path in paths],
        arrays.astype(np.float32) / 255,
    ):
        np.testing.assert_allclose(fitted.predict_proba(same), expected, atol=1e-6)


def test_it_trains_on_paths_and_pil_images(digits, tmp_path):
    X = []
    for number, pixels in enumerate(digits[0][:60]):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        X.append(tmp_path / f"{number}.png" if number % 2 else Image.fromarray(pixels))
    assert tiny().fit(X, digits[1][:60]).predict(X[:4]).shape == (4,)


def test_a_handful_of_images_is_enough(digits):
    X, y = digits
    few = np.concatenate([np.flatnonzero(y == label)[:2] for label in (0, 1)])
    assert tiny().fit(X[few], y[few]).predict(X[few]).shape == (4,)


def test_runs_stay_on_disk_only_if_asked_for(run, fitted):
    assert (run.folder / "model.safetensors").is_file() and (run.folder / "report.html").is_file()
    assert fitted.run_ is None and fitted.metrics_["val"]["accuracy"] > 0


def test_every_fit_starts_its_own_run(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.run.finish.make_report", lambda *rest: None)
    for _ in range(2):
        tiny(runs=tmp_path / "fits").fit(digits[0][:60], digits[1][:60])
    assert len(list((tmp_path / "fits").iterdir())) == 2


def test_parameters_are_those_of_the_constructor(fitted):
    assert clone(fitted).get_params() == fitted.get_params()
    assert fitted.get_params()["settings"] is TINY
    assert clone(fitted).set_params(epochs=7).epochs == 7
    assert is_classifier(fitted) and not hasattr(clone(fitted), "classifier_")
    assert vitrail.ViTClassifier().minutes == 5


def test_epochs_replace_minutes(digits):
    found = tiny(minutes=60, epochs=2).fit(digits[0][:60], digits[1][:60])
    assert found.metrics_["epochs"] == 2


def test_cross_validation(digits):
    scores = cross_val_score(tiny(), digits[0][:150], digits[1][:150], cv=2)
    assert scores.shape == (2,) and np.isfinite(scores).all()


@pytest.mark.slow
def test_grid_search_in_two_processes(digits):
    search = GridSearchCV(tiny(), {"epochs": [1, 8]}, cv=2, n_jobs=2, error_score="raise")
    search.fit(digits[0][:150], digits[1][:150])
    assert search.best_params_ == {"epochs": 8}
    assert search.predict(digits[0][:3]).shape == (3,)


def test_features_in_a_pipeline(run, digits):
    pipeline = make_pipeline(vitrail.ViTFeatures(run.folder), LogisticRegression(max_iter=500))
    assert pipeline.fit(*digits).score(*digits) > 0.8
    assert cross_val_score(pipeline, *digits, cv=2).min() > 0.6


def test_features_are_those_of_the_classifier(run, digits):
    found = vitrail.ViTFeatures(run.folder).fit_transform(digits[0][:7])
    expected = vitrail.load(run.folder).features(list(digits[0][:7]))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    given = vitrail.ViTFeatures(vitrail.load(run.folder)).fit_transform(digits[0][:7])
    np.testing.assert_array_equal(given, found)


def test_features_have_names(run, digits):
    transformer = vitrail.ViTFeatures(run.folder).fit(digits[0][:2])
    names = transformer.get_feature_names_out()
    assert names[0] == "vitfeatures0" and len(names) == 16


def test_fitted_estimators_pickle_as_model_files(fitted, run, digits):
    X = digits[0][:5]
    content = pickle.dumps(fitted)
    assert b"torch._utils" not in content and b"safetensors" not in content.split(b"{", 1)[0]
    np.testing.assert_array_equal(pickle.loads(content).predict_proba(X), fitted.predict_proba(X))
    features = vitrail.ViTFeatures(run.folder, layers=(0,)).fit(X)
    again = pickle.loads(pickle.dumps(features))
    np.testing.assert_array_equal(again.transform(X), features.transform(X))
    assert pickle.loads(pickle.dumps(tiny())).get_params() == tiny().get_params()


def test_unfitted_estimators_say_so(digits):
    for method in (tiny().predict, tiny().predict_proba):
        with pytest.raises(NotFittedError):
            method(digits[0][:2])
    with pytest.raises(NotFittedError):
        vitrail.ViTFeatures("nowhere").transform(digits[0][:2])


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros((4, 64)), r"shape \(4, 64\).*X.reshape\(-1, 8, 8\)"),
        (np.zeros((8,)), r"shape \(8,\)"),
        ("a.png", "a single image"),
        ([], "0 images"),
        (3, "a int; give a list"),
    ],
)
def test_what_cannot_be_images_is_refused(X, message):
    with pytest.raises(vitrail.UserError, match=message):
        list_images(X)


def test_labels_must_fit_the_images(digits):
    X, y = digits
    with pytest.raises(vitrail.UserError, match="60 images and y 59 labels"):
        tiny().fit(X[:60], y[:59])
    with pytest.raises(vitrail.UserError, match="only one class"):
        tiny().fit(X[:5], [1] * 5)
    with pytest.raises(vitrail.UserError, match="too few"):
        tiny().fit(X[:2], [0, 1])


def test_labels_that_print_alike_stay_apart():
    assert class_names(np.array([1, "1"], object)) == ("1", "'1'")


def test_a_tenth_of_each_class_is_held_out_and_copies_stay_together(digits):
    X, y = digits
    source = make_source(list(np.concatenate([X, X])), np.concatenate([y, y]), tuple("0123456789"))
    splits = hold_out_validation(source).splits
    assert (splits[: len(X)] == splits[len(X) :]).all()
    assert 0.05 < (splits == "val").mean() < 0.2
    assert set(source.labels[splits == "val"]) == set(range(10))


# The checks of scikit-learn feed tables, so each row becomes a small picture. With that all of
# them make sense and pass; a check that does not would be listed here with the reason.
EXPECTED_FAILURES: dict[str, str] = {}


class OnTables(vitrail.ViTClassifier):
    """Draws a row as bars, so that the checks for tables run the real fit and predict."""

    def fit(self, X, y):
        X, y = validate_data(self, X, y, dtype=np.float64)
        return super().fit(bars(X), y)

    def predict_proba(self, X):
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return super().predict_proba(bars(validate_data(self, X, dtype=np.float64, reset=False)))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        tags.input_tags.three_d_array = False
        return tags


class FeaturesOfTables(vitrail.ViTFeatures):
    """The same for the transformer."""

    def fit(self, X, y=None):
        X = validate_data(self, X, dtype=np.float64)
        return super().fit(bars(X), y)

    def transform(self, X):
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return super().transform(bars(validate_data(self, X, dtype=np.float64, reset=False)))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        tags.input_tags.three_d_array = False
        return tags


def bars(X):
    """Grey pictures of 8 x 8 pixels, whose columns are the values of a row, over and over."""
    grey = (128 + 18 * np.sign(X) * np.log1p(np.abs(X).clip(max=1000))).astype(np.uint8)
    rows = np.resize(np.arange(X.shape[1]), 8)
    return np.repeat(grey[:, None, rows], 8, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classifier", "transformer"])
def test_the_checks_of_scikit_learn_pass(kind, run):
    """As above, on tables: scikit-learn skips estimators whose tags say that they want images."""
    classifier = OnTables(epochs=5, settings=TINY, device="cpu")
    estimator = classifier if kind == "classifier" else FeaturesOfTables(run.folder, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some checks warn on purpose
        results = check_estimator(
            estimator, expected_failed_checks=EXPECTED_FAILURES, on_skip=None, on_fail=None
        )
    failed = [
        f"{one['check_name']}: {one['exception']!r:.300}"
        for one in results
        if one["status"] == "failed"
    ]
    assert not failed, "\n".join(failed)
    assert sum(one["status"] == "passed" for one in results) > 30


def test_scikit_learn_knows_that_samples_are_images(digits):
    for estimator in (tiny(), vitrail.ViTFeatures("anywhere")):
        tags = get_tags(estimator).input_tags
        assert tags.three_d_array and tags.string and not tags.two_d_array
    with pytest.warns(SkipTestWarning, match="Can't test estimator ViTClassifier"):
        check_estimator(tiny())
