"""Parameters and multiply-adds of an architecture in closed form, without building it."""

from itertools import pairwise
from typing import NamedTuple

from vitrail.model.config import STAGES, ViTConfig, stem_widths


def count_parameters(config: ViTConfig) -> int:
    """The number of trainable parameters."""
    width = config.width
    norm = 2 * width
    qk_norm = 4 * (width // config.heads) if config.qk_norm else 0
    block = _attention_parameters(config) + _mlp_parameters(config) + 2 * norm + qk_norm
    if config.layer_scale is not None:
        block += 2 * width
    total = _embedding_parameters(config) + config.depth * block + norm + _head_parameters(config)
    total += config.prefix * width
    if config.positions == "learned":
        total += (config.class_tokens + config.patches) * width
    if config.pre_norm:
        total += norm
    if config.pool == "map":  # the learned query, one norm, attention and an MLP
        total += width + norm + _attention_parameters(config) + _mlp_parameters(config)
    return total


def count_statistics(config: ViTConfig) -> int:
    """The running means and variances of batch norms: stored with the weights, not trained."""
    return sum(2 * conv.out_channels for conv in _small_stem(config)) if config.small_stem else 0


def count_macs(config: ViTConfig, kept: int | None = None) -> int:
    """Multiply-adds for one image: matrix products and convolutions, as papers count them.

    `kept` is the number of patches that the blocks process, by default all.
    """
    width, patches = config.width, config.patches if kept is None else kept
    tokens = config.prefix + patches
    linear = 4 * width * width + (3 if config.mlp == "swiglu" else 2) * width * config.hidden
    block = tokens * linear + 2 * tokens * tokens * width
    total = _embedding_macs(config) + config.depth * block + _head_macs(config)
    if config.pool == "map":
        total += patches * (2 * width * width + 2 * width) + linear - 2 * width * width
    return total


def count_activation_bytes(config: ViTConfig, itemsize: int = 4) -> int:
    """What a training step stores of one image for its backward pass, in bytes.

    `itemsize` is that of the matrix products: 4, or 2 in mixed precision. The residual stream,
    which the norms read, is float32 in either case.
    """
    width, hidden = config.width, config.hidden
    values = 6 * width  # the inputs of qkv, proj and fc1; queries, keys and values
    values += hidden * (4 if config.mlp == "swiglu" else 2)
    values += 2 * width if config.layer_scale is not None else 0
    values += 2 * width + hidden if config.dropout else 0
    values += 3 * width if config.qk_norm else 0
    values += 2 * width if config.positions == "rotary" else 0
    block = 2 * 4 * width + itemsize * values
    height, breadth = config.size
    stem = config.channels * height * breadth
    if config.stem != "patch":  # the input and the output of each norm
        maps = (c.out_channels * height * breadth // c.stride**2 for c in _convolutions(config))
        stem += 2 * sum(maps)
    return config.tokens * (config.depth * block + 3 * 4 * width) + itemsize * stem


def _attention_parameters(config: ViTConfig) -> int:
    return 4 * (config.width * config.width + config.width)


def _mlp_parameters(config: ViTConfig) -> int:
    first = 2 * config.hidden if config.mlp == "swiglu" else config.hidden
    return (config.width + 1) * first + (config.hidden + 1) * config.width


def _head_parameters(config: ViTConfig) -> int:
    if config.head == "none":
        return 0
    hidden = (config.width + 1) * config.width if config.head == "mlp" else 0
    return hidden + (config.feature_width + 1) * config.classes * (2 if config.distilled else 1)


def _head_macs(config: ViTConfig) -> int:
    if config.head == "none":
        return 0
    hidden = config.width * config.width if config.head == "mlp" else 0
    return hidden + config.feature_width * config.classes * (2 if config.distilled else 1)


def _embedding_parameters(config: ViTConfig) -> int:
    if config.stem == "patch":
        return config.width * (config.channels * config.patch**2 + 1)
    convolutions = _convolutions(config)
    weights = sum(conv.weights for conv in convolutions)
    norms = sum(2 * conv.out_channels for conv in convolutions)
    return weights + norms + config.width * (_stem_width(config) + 1)


def _embedding_macs(config: ViTConfig) -> int:
    if config.stem == "patch":
        return config.patches * config.width * config.channels * config.patch**2
    height, width = config.size
    convolutions = _convolutions(config)
    stem = sum(c.weights * (height // c.stride) * (width // c.stride) for c in convolutions)
    return stem + config.patches * config.width * _stem_width(config)


def _stem_width(config: ViTConfig) -> int:
    """Channels of the feature map that the patch embedding reads."""
    if config.small_stem:
        return config.width
    return _convolutions(config)[-1].out_channels


def _small_stem(config: ViTConfig) -> list["_Convolution"]:
    """The convolutions of the stems "conv" and "r9"; pooling follows a convolution."""
    widths = stem_widths(config.width, config.patch)
    pairs = list(pairwise(widths))
    if config.stem == "conv":
        pairs[0] = config.channels, widths[1]
        return [_Convolution(a, b, 3, 2 << i) for i, (a, b) in enumerate(pairs)]
    second = widths[1]
    return [
        _Convolution(config.channels, widths[0], 3, 1),
        *(_Convolution(a, b, 3, 1 << i) for i, (a, b) in enumerate(pairs)),
        *2 * [_Convolution(second, second, 3, 2)],
    ]


class _Convolution(NamedTuple):
    in_channels: int
    out_channels: int
    kernel: int
    stride: int  # total, from the image to this output

    @property
    def weights(self) -> int:
        return self.in_channels * self.out_channels * self.kernel**2


def _convolutions(config: ViTConfig) -> list[_Convolution]:
    """Every convolution of the stem, the shortcuts of a ResNet included."""
    if config.small_stem:
        return _small_stem(config)
    convolutions = [_Convolution(config.channels, 64, 7, 2)]
    channels = 64
    for stage, depth in enumerate(STAGES[config.stem, config.patch]):
        out_channels, stride = 256 * 2**stage, 4 * 2**stage
        bottleneck = out_channels // 4
        for block in range(depth):
            input_stride = max(4, stride // 2) if block == 0 else stride
            if block == 0:
                convolutions.append(_Convolution(channels, out_channels, 1, stride))
            convolutions += [
                _Convolution(channels, bottleneck, 1, input_stride),
                _Convolution(bottleneck, bottleneck, 3, stride),
                _Convolution(bottleneck, out_channels, 1, stride),
            ]
            channels = out_channels
    return convolutions
