"""How good features are: how many directions they use, and whether neighbours share labels."""

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_ROWS = 5000  # images that the neighbours are searched among
TINY = 1e-12


def effective_rank(features: Tensor) -> float:
    """The exponential of the entropy of the singular values (Roy and Vetterli, 2007).

    From 1, all features on a line, to their width; computed after subtracting the mean.
    """
    x = features.double() - features.double().mean(dim=0)
    values = torch.linalg.eigvalsh(x.T @ x).clamp(min=0).sqrt()
    share = values / values.sum().clamp(min=TINY)
    entropy = -(share * share.clamp(min=TINY).log()).sum()
    return float(entropy.exp())


def relative_spread(features: Tensor) -> float:
    """The standard deviation over the root mean square: 0 if all images have the same features."""
    x = features.double()
    deviation = (x - x.mean(dim=0)).square().mean().sqrt()
    return float(deviation / x.square().mean().sqrt().clamp(min=TINY))


def neighbour_accuracy(features: Tensor, labels: Tensor, k: int = 10) -> float:
    """How often the majority of the `k` most similar other images has the label of an image."""
    rows = torch.linspace(0, len(features) - 1, min(len(features), MAX_ROWS)).round().long()
    x, y = F.normalize(features[rows].float(), dim=1), labels[rows]  # they may be sorted by class
    similarity = (x @ x.T).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(k, len(x) - 1), dim=1).indices
    votes = F.one_hot(y[nearest], int(y.max()) + 1).sum(dim=1)
    return float((votes.argmax(dim=1) == y).double().mean())
