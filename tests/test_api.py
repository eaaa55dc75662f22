"""The Python API: explicit, annotated, with the defaults of the command line."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
import typing

import pytest

import vitrail

FUNCTIONS = [name for name in vitrail.__all__ if inspect.isfunction(getattr(vitrail, name))]
CLASSES = [name for name in vitrail.__all__ if inspect.isclass(getattr(vitrail, name))]
METHODS = {
    f"{name}.{attribute}": member
    for name in CLASSES
    for attribute, member in vars(getattr(vitrail, name)).items()
    if inspect.isfunction(member) and not attribute.startswith("_")
}
CALLABLES = {name: getattr(vitrail, name) for name in FUNCTIONS} | METHODS

VERBS = {  # command: the function with the same arguments
    "train": vitrail.train,
    "pretrain": vitrail.pretrain,
    "resume": vitrail.resume,
    "check": vitrail.check,
    "shard": vitrail.shard,
    "search": vitrail.search,
    "compare": vitrail.compare,
    "convert": vitrail.convert,
    "export": vitrail.export,
    "models": vitrail.models,
    "datasets": vitrail.datasets,
    "head": vitrail.compare_heads,
    "evaluate": vitrail.Classifier.evaluate,
    "predict": vitrail.Classifier.predict,
    "explain": vitrail.Classifier.explain,
    "report": vitrail.report,
    "verify": vitrail.verify,
    "serve": vitrail.serve,
    "calibrate": vitrail.calibrate,
    "monitor": vitrail.monitor,
    "features": vitrail.features,
    "similar": vitrail.similar,
}
OTHER_DEFAULTS = {  # arguments whose defaults differ on purpose
    ("calibrate", "out"): "the command writes a file; Python returns the classifier",
    ("head", "kinds"): "the command resolves () to logistic, or to all kinds with --all",
    ("predict", "top"): "the command prints 1 class in its table and 5 in JSON; Python gives 5",
}
RESULTS = [name for name in CLASSES if dataclasses.is_dataclass(getattr(vitrail, name))]


def test_the_names_are_sorted_and_all_exist():
    assert vitrail.__all__ == sorted(vitrail.__all__)
    assert {getattr(vitrail, name).__name__ for name in vitrail.__all__} == set(vitrail.__all__)
    assert set(vitrail.__all__) <= set(dir(vitrail))


def test_importing_vitrail_imports_neither_torch_nor_scikit_learn():
    code = "import sys, vitrail; assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_scikit_learn_the_estimators_name_the_extra():
    code = """
import sys
sys.modules["sklearn"] = None
import vitrail
vitrail.preset("S/16")
try:
    vitrail.ViTClassifier
except vitrail.UserError as error:
    assert "vitrail[heads]" in str(error), error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", CALLABLES)
def test_arguments_are_explicit_and_annotated(name):
    signature = inspect.signature(CALLABLES[name])
    for argument in signature.parameters.values():
        if argument.name == "self":
            continue
        assert argument.kind is not argument.VAR_KEYWORD, argument
        assert argument.annotation is not argument.empty, argument
    assert signature.return_annotation not in (signature.empty, "Any", "typing.Any")


MODEL_CODE = "ViT."  # the lesson checks its tensors itself; `tests/test_attacks.py` has examples
RAISES = ("EngineClassifier.explain", "EngineClassifier.export")  # whatever the arguments are
SCIKIT_LEARN = ("ViTClassifier.", "ViTFeatures.")  # `X` and `y` have checks of their own


@pytest.mark.parametrize("name", CALLABLES)
def test_arguments_are_checked_at_the_door(name):
    function = CALLABLES[name]
    plain = inspect.signature(function).parameters.keys() <= {"self"}
    if not plain and not name.startswith((MODEL_CODE, *SCIKIT_LEARN)) and name not in RAISES:
        assert function.__wrapped__.__code__ is not function.__code__


@pytest.mark.parametrize("name", ["Classifier", "FeatureClassifier"])
def test_type_checkers_see_what_predict_returns(name):
    overloads = typing.get_overloads(getattr(vitrail, name).predict)
    returned = [inspect.signature(one).return_annotation for one in overloads]
    assert returned == [vitrail.Prediction, list[vitrail.Prediction]]


@pytest.mark.parametrize("verb", VERBS)
def test_defaults_are_those_of_the_command_line(verb):
    command = getattr(importlib.import_module(f"vitrail.cli.{verb}"), verb)
    flags, arguments = (inspect.signature(one).parameters for one in (command, VERBS[verb]))
    shared = [name for name in flags if name in arguments and (verb, name) not in OTHER_DEFAULTS]
    assert shared or not flags.keys() - {"json"}
    for name in shared:
        ours, theirs = arguments[name].default, flags[name].default
        required = ours is inspect.Parameter.empty  # the command raises its own error without it
        sections = dataclasses.is_dataclass(theirs) and ours is None  # None: no setting is given
        nothing = theirs in (None, ()) and ours in (None, ())
        assert required or sections or nothing or ours == theirs, (name, ours, theirs)


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_frozen_with_a_repr_of_their_own(name):
    result = getattr(vitrail, name)
    assert result.__dataclass_params__.frozen
    assert result.__repr__ is not object.__repr__


@pytest.mark.parametrize("name", ["Prediction", "Evaluation", "DataCheck", "Explanation", "Run"])
def test_results_have_a_view_for_notebooks(name):
    assert callable(getattr(vitrail, name)._repr_html_)
