"""Masked autoencoding: what is hidden stays hidden, and what is rebuilt is in its place."""

import pytest
import torch

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.hog import oriented_gradients
from vitrail.pretraining.masked import (
    MaskedAutoencoder,
    crop_rectangles,
    draw_rectangles,
    normalise_patches,
    patchify,
    take,
    unpatchify,
)

SIZES = {"image": 16, "patch": 4, "width": 16, "depth": 1, "heads": 1, "head": "none"}
IMAGES = torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def make(**changes):
    torch.manual_seed(0)
    settings = {name: changes.pop(name) for name in ("normalise", "hog") if name in changes}
    vit = ViTConfig(**SIZES | {"positions": "sincos", "pool": "avg"} | changes)
    return MaskedAutoencoder(ViT(vit), PretrainConfig(decoder_width=16, **settings)).eval()


def test_patches_are_put_back_where_they_were():
    assert torch.equal(unpatchify(patchify(IMAGES, 4), (4, 6), 4), IMAGES)
    assert torch.equal(patchify(IMAGES, 4)[0, 7], IMAGES[0, :, 4:8, 4:8].flatten())


@pytest.mark.parametrize("positions", ["sincos", "learned", "rotary"])
@pytest.mark.parametrize("stem", ["patch", "conv", "r9"])
def test_hidden_pixels_never_reach_the_prediction(stem, positions):
    model = make(stem=stem, positions=positions)
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


def test_rectangles_stay_inside_and_differ_between_images():
    generator = torch.Generator().manual_seed(0)
    for fraction, grid in (
        (0.4, (4, 4)),
        (0.25, (8, 8)),
        (0.4, (3, 5)),
        (0.9, (2, 2)),
        (0.05, (4, 4)),
    ):
        for _ in range(20):
            found = draw_rectangles(50, grid, fraction, generator)
            rows, columns = found.shape[1:]
            assert rows * columns < grid[0] * grid[1]
            assert found.min() >= 0 and found.max() < grid[0] * grid[1]
            assert torch.equal(
                found % grid[1] - found[:, :1, :1] % grid[1], torch.arange(columns).expand_as(found)
            )
    shapes = {tuple(draw_rectangles(1, (4, 4), 0.4, generator).shape[1:]) for _ in range(30)}
    assert shapes == {(2, 3), (3, 2)}
    assert len(draw_rectangles(200, (4, 4), 0.4, generator)[:, 0, 0].unique()) == 6  # all places


def test_rectangles_are_cropped_from_their_images():
    visible = draw_rectangles(3, (4, 6), 0.25, torch.Generator().manual_seed(1))
    pixels = patchify(crop_rectangles(IMAGES, visible, 4), 4)
    assert torch.equal(pixels, take(patchify(IMAGES, 4), visible.flatten(1)))


@pytest.mark.parametrize("positions", ["sincos", "learned", "rotary"])
def test_tokens_of_a_rectangle_have_the_positions_of_its_patches(positions):
    model = make(positions=positions, registers=1)  # patches without a stem have no neighbours
    visible = draw_rectangles(3, (4, 6), 0.4, torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        model.encode(IMAGES, visible), model.encode(IMAGES, visible.flatten(1))
    )


def test_convolutions_never_see_more_than_the_rectangle():
    model, sizes = make(stem="r9").train(), []
    model.backbone.patch_embed.register_forward_pre_hook(lambda _, x: sizes.append(x[0].shape[2:]))
    model(IMAGES)
    visible, _ = model.draw_masks(IMAGES)
    assert sizes[0].numel() == visible[0].numel() * 16 < IMAGES[0, 0].numel() / 2


def test_gradients_weigh_in_the_loss_and_stay_out_of_the_pixels():
    model = make(hog=0.75)
    visible, hidden = model.draw_masks(IMAGES)
    predicted = model.predict_patches(IMAGES, visible, hidden)
    pixels, gradients = predicted[..., :48], predicted[..., 48:]
    wanted = (
        take(patchify(IMAGES, 4), hidden),
        take(patchify(oriented_gradients(IMAGES, 4), 1), hidden),
    )
    errors = [
        (mine - true).square().mean(dim=(1, 2))
        for mine, true in zip((pixels, gradients), wanted, strict=True)
    ]
    torch.testing.assert_close(model(IMAGES)[:, 0], 0.25 * errors[0] + 0.75 * errors[1])
    rebuilt = patchify(model.rebuild(IMAGES)[1], 4)
    torch.testing.assert_close(take(rebuilt, hidden), pixels)
