"""The Vision Transformer you can read in an evening, train on your own images, and see through."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors
    from vitrail.batch.job import BatchOutput as BatchOutput
    from vitrail.batch.job import batch_predict as batch_predict
    from vitrail.batch.job import features as features
    from vitrail.batch.similar import Similar as Similar
    from vitrail.batch.similar import similar as similar
    from vitrail.data.open import open_data as open_data
    from vitrail.data.sharding import Sharding as Sharding
    from vitrail.data.sharding import shard as shard
    from vitrail.data.sources.catalogue import DatasetInfo as DatasetInfo
    from vitrail.data.sources.catalogue import datasets as datasets
    from vitrail.errors import UserError as UserError
    from vitrail.exporting.export import Export as Export
    from vitrail.inference.backbone import Backbone as Backbone
    from vitrail.inference.backbone import load_backbone as load_backbone
    from vitrail.inference.calibrate import calibrate as calibrate
    from vitrail.inference.classifier import Classifier as Classifier
    from vitrail.inference.engine_classifier import EngineClassifier as EngineClassifier
    from vitrail.inference.evaluate import Evaluation as Evaluation
    from vitrail.inference.export import export as export
    from vitrail.inference.head import FeatureClassifier as FeatureClassifier
    from vitrail.inference.head import head as head
    from vitrail.inference.head_comparison import HeadComparison as HeadComparison
    from vitrail.inference.head_comparison import compare_heads as compare_heads
    from vitrail.inference.load import load as load
    from vitrail.inference.monitor import Drift as Drift
    from vitrail.inference.monitor import monitor as monitor
    from vitrail.inference.prediction import Prediction as Prediction
    from vitrail.inference.verify import Verification as Verification
    from vitrail.inference.verify import verify as verify
    from vitrail.insight.explanation import Explanation as Explanation
    from vitrail.insight.maps import attention as attention
    from vitrail.model.config import ViTConfig as ViTConfig
    from vitrail.model.vit import ViT as ViT
    from vitrail.run.check import DataCheck as DataCheck
    from vitrail.run.check import check as check
    from vitrail.run.doctor import Diagnosis as Diagnosis
    from vitrail.run.doctor import doctor as doctor
    from vitrail.run.estimators import ViTClassifier as ViTClassifier
    from vitrail.run.estimators import ViTFeatures as ViTFeatures
    from vitrail.run.forecast import Forecast as Forecast
    from vitrail.run.planning import plan as plan
    from vitrail.run.pretrain import pretrain as pretrain
    from vitrail.run.report.compare import Comparison as Comparison
    from vitrail.run.report.compare import compare as compare
    from vitrail.run.report.make import Report as Report
    from vitrail.run.report.make import report as report
    from vitrail.run.result import Pretraining as Pretraining
    from vitrail.run.result import Run as Run
    from vitrail.run.resume import resume as resume
    from vitrail.run.teacher import Teacher as Teacher
    from vitrail.run.train import train as train
    from vitrail.server.http_client import client as client
    from vitrail.server.serve import serve as serve
    from vitrail.tuning.optimize import search as search
    from vitrail.tuning.result import SearchResult as SearchResult
    from vitrail.zoo.convert import Conversion as Conversion
    from vitrail.zoo.convert import convert as convert
    from vitrail.zoo.models import ModelInfo as ModelInfo
    from vitrail.zoo.models import WeightsInfo as WeightsInfo
    from vitrail.zoo.models import models as models
    from vitrail.zoo.presets import preset as preset

__version__ = "0.2.0"

_HOMES = {  # imported on first use, so that `vitrail --help` does not wait for torch
    "Backbone": "vitrail.inference.backbone",
    "BatchOutput": "vitrail.batch.job",
    "Classifier": "vitrail.inference.classifier",
    "Comparison": "vitrail.run.report.compare",
    "Conversion": "vitrail.zoo.convert",
    "DataCheck": "vitrail.run.check",
    "DatasetInfo": "vitrail.data.sources.catalogue",
    "Diagnosis": "vitrail.run.doctor",
    "EngineClassifier": "vitrail.inference.engine_classifier",
    "Drift": "vitrail.inference.monitor",
    "Evaluation": "vitrail.inference.evaluate",
    "Explanation": "vitrail.insight.explanation",
    "Export": "vitrail.exporting.export",
    "FeatureClassifier": "vitrail.inference.head",
    "Forecast": "vitrail.run.forecast",
    "HeadComparison": "vitrail.inference.head_comparison",
    "ModelInfo": "vitrail.zoo.models",
    "Prediction": "vitrail.inference.prediction",
    "Pretraining": "vitrail.run.result",
    "Report": "vitrail.run.report.make",
    "Run": "vitrail.run.result",
    "SearchResult": "vitrail.tuning.result",
    "Sharding": "vitrail.data.sharding",
    "Similar": "vitrail.batch.similar",
    "Teacher": "vitrail.run.teacher",
    "UserError": "vitrail.errors",
    "Verification": "vitrail.inference.verify",
    "ViT": "vitrail.model.vit",
    "ViTClassifier": "vitrail.run.estimators",
    "ViTConfig": "vitrail.model.config",
    "ViTFeatures": "vitrail.run.estimators",
    "WeightsInfo": "vitrail.zoo.models",
    "attention": "vitrail.insight.maps",
    "batch_predict": "vitrail.batch.job",
    "calibrate": "vitrail.inference.calibrate",
    "check": "vitrail.run.check",
    "client": "vitrail.server.http_client",
    "compare": "vitrail.run.report.compare",
    "compare_heads": "vitrail.inference.head_comparison",
    "convert": "vitrail.zoo.convert",
    "datasets": "vitrail.data.sources.catalogue",
    "doctor": "vitrail.run.doctor",
    "export": "vitrail.inference.export",
    "features": "vitrail.batch.job",
    "head": "vitrail.inference.head",
    "load": "vitrail.inference.load",
    "load_backbone": "vitrail.inference.backbone",
    "models": "vitrail.zoo.models",
    "monitor": "vitrail.inference.monitor",
    "open_data": "vitrail.data.open",
    "plan": "vitrail.run.planning",
    "preset": "vitrail.zoo.presets",
    "pretrain": "vitrail.run.pretrain",
    "report": "vitrail.run.report.make",
    "resume": "vitrail.run.resume",
    "search": "vitrail.tuning.optimize",
    "serve": "vitrail.server.serve",
    "shard": "vitrail.data.sharding",
    "similar": "vitrail.batch.similar",
    "train": "vitrail.run.train",
    "verify": "vitrail.inference.verify",
}

__all__ = [
    "Backbone",
    "BatchOutput",
    "Classifier",
    "Comparison",
    "Conversion",
    "DataCheck",
    "DatasetInfo",
    "Diagnosis",
    "Drift",
    "EngineClassifier",
    "Evaluation",
    "Explanation",
    "Export",
    "FeatureClassifier",
    "Forecast",
    "HeadComparison",
    "ModelInfo",
    "Prediction",
    "Pretraining",
    "Report",
    "Run",
    "SearchResult",
    "Sharding",
    "Similar",
    "Teacher",
    "UserError",
    "Verification",
    "ViT",
    "ViTClassifier",
    "ViTConfig",
    "ViTFeatures",
    "WeightsInfo",
    "attention",
    "batch_predict",
    "calibrate",
    "check",
    "client",
    "compare",
    "compare_heads",
    "convert",
    "datasets",
    "doctor",
    "export",
    "features",
    "head",
    "load",
    "load_backbone",
    "models",
    "monitor",
    "open_data",
    "plan",
    "preset",
    "pretrain",
    "report",
    "resume",
    "search",
    "serve",
    "shard",
    "similar",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
