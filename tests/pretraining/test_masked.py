"""Masked autoencoding: what is hidden stays hidden, and what is rebuilt is in its place."""

import pytest
import torch

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.masked import (
    MaskedAutoencoder,
    normalise_patches,
    patchify,
    take,
    unpatchify,
)

SIZES = {"image": 16, "patch": 4, "width": 16, "depth": 1, "heads": 1, "head": "none"}
IMAGES = torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def make(**changes):
    torch.manual_seed(0)
    settings = {name: changes.pop(name) for name in ("normalise",) if name in changes}
    vit = ViTConfig(**SIZES | {"positions": "sincos", "pool": "avg"} | changes)
    return MaskedAutoencoder(ViT(vit), PretrainConfig(decoder_width=16, **settings)).eval()


def test_patches_are_put_back_where_they_were():
    assert torch.equal(unpatchify(patchify(IMAGES, 4), (4, 6), 4), IMAGES)
    assert torch.equal(patchify(IMAGES, 4)[0, 7], IMAGES[0, :, 4:8, 4:8].flatten())


@pytest.mark.parametrize("stem", ["patch", "conv", "r9"])
def test_hidden_pixels_never_reach_the_prediction(stem):
    model = make(stem=stem)
    visible, hidden = model.draw_masks(IMAGES)
    changed = patchify(IMAGES, 4)
    changed.scatter_(1, hidden[:, :, None].expand(-1, -1, 48), 9.0)
    before, after = (
        model.predict_patches(images, visible, hidden)
        for images in (IMAGES, unpatchify(changed, (4, 6), 4))
    )
    assert torch.equal(before, after)


def test_the_loss_is_that_of_the_hidden_patches_alone():
    model = make()
    visible, hidden = model.draw_masks(IMAGES)
    assert hidden.shape[1] == 18 and visible.shape[1] == 6
    predicted, true = model.predict_patches(IMAGES, visible, hidden), patchify(IMAGES, 4)
    wanted = torch.stack([row[index] for row, index in zip(true, hidden, strict=True)])
    expected = (predicted - wanted).square().mean(dim=(1, 2))
    torch.testing.assert_close(model(IMAGES)[:, 0], expected)


def test_rebuilt_images_keep_the_visible_patches_and_the_scale_of_the_hidden_ones():
    model = make(normalise=True)
    blanked, rebuilt = model.rebuild(IMAGES)
    visible, hidden = model.draw_masks(IMAGES)
    patches = {name: patchify(x, 4) for name, x in (("b", blanked), ("r", rebuilt), ("t", IMAGES))}
    for row in range(len(IMAGES)):
        assert torch.equal(patches["r"][row, visible[row]], patches["t"][row, visible[row]])
        assert not patches["b"][row, hidden[row]].any()
    with torch.no_grad():  # a perfect prediction of normalised targets gives the image back
        perfect = normalise_patches(patchify(IMAGES, 4))[0]
    model.predict_patches = lambda images, visible, hidden: take(perfect, hidden)
    torch.testing.assert_close(model.rebuild(IMAGES)[1], IMAGES)
    assert float(model(IMAGES).max()) < 1e-10


def test_masks_differ_in_training_and_are_fixed_in_evaluation():
    model = make()
    assert torch.equal(model.draw_masks(IMAGES)[0], model.draw_masks(IMAGES)[0])
    model.train()
    assert not torch.equal(model.draw_masks(IMAGES)[0], model.draw_masks(IMAGES)[0])


def test_every_parameter_learns():
    model = make(pool="cls", registers=2).train()
    model(IMAGES).sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
