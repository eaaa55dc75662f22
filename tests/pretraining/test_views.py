"""Agreeing views: crops, and a distance that is smallest for a Gaussian."""

import torch

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.views import AgreeingViews, Draws, crop_views, gaussian_distance

VIT = ViTConfig(image=16, patch=4, width=16, depth=1, heads=1, head="none", pool="avg")


def generator():
    return torch.Generator().manual_seed(0)


def test_a_gaussian_is_the_nearest_to_a_gaussian():
    x = torch.randn(1, 512, 4, generator=generator())
    others = {
        "narrow": 0.2 * x,
        "collapsed": torch.zeros_like(x),
        "shifted": x + 1,
        "uniform": 4 * torch.rand(1, 512, 4, generator=generator()) - 2,
        "line": x[..., :1].expand(-1, -1, 4),
    }
    best = gaussian_distance(x, 64, generator())
    assert all(gaussian_distance(one, 64, generator()) > 2 * best for one in others.values())


def test_a_whole_crop_is_the_image_or_its_mirror_image():
    images = torch.rand(8, 3, 16, 16, generator=generator())
    draws = Draws(8, images.device, generator())
    # with an area fraction of 1 the aspect ratio still varies, but no side exceeds the image
    crops = crop_views(images, (16, 16), (1.0, 1.0), 0.0, draws)
    assert crops.shape == images.shape and not torch.allclose(crops, images)
    square = torch.ones(8, 1, 1, 1)
    draws.uniform = lambda: 0.5 * square  # the middle of every range: ratio 1, no shift
    torch.testing.assert_close(crop_views(images, (16, 16), (1.0, 1.0), 0.0, draws), images)
    mirrored = crop_views(images, (16, 16), (1.0, 1.0), 1.0, draws)
    torch.testing.assert_close(mirrored, images.flip(-1))


def test_local_views_are_smaller_and_every_parameter_learns():
    torch.manual_seed(0)
    config = PretrainConfig(method="views", views=2, local_views=2)
    model = AgreeingViews(ViT(VIT), config, torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    images = torch.rand(8, 3, 16, 16)
    assert [tuple(view.shape[-2:]) for view in model.draw_views(images, None)] == [
        *[(16, 16)] * 2,
        *[(8, 8)] * 2,
    ]
    loss = model(images)
    assert loss.shape == (8, 1)
    loss.sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@torch.no_grad()
def test_equal_views_have_nothing_but_the_distance_of_their_batch():
    torch.manual_seed(0)
    config = PretrainConfig(method="views", views=2)
    model = AgreeingViews(ViT(VIT), config, torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    images = torch.rand(8, 3, 16, 16)
    assert model(images).unique().numel() > 1
    model.draw_views = lambda images, generator: [images, images]
    assert model(images).unique().numel() == 1
