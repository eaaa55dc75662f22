"""Parameters and multiplications of an architecture in closed form, without building it."""

from vitrail.model.config import STAGES, ViTConfig


def parameters(config: ViTConfig) -> int:
    """How many numbers are trained."""
    width = config.width
    norm = 2 * width
    qk_norm = 4 * (width // config.heads) if config.qk_norm else 0
    block = _attention(config) + _mlp(config) + 2 * norm + qk_norm
    if config.layer_scale is not None:
        block += 2 * width
    total = _patches(config) + config.depth * block + norm + _head(config)
    total += config.prefix * width
    if config.positions == "learned":
        total += (config.readers + config.patches) * width
    if config.pre_norm:
        total += norm
    if config.pool == "map":  # the question itself, a norm, and a block without norms of its own
        total += width + norm + _attention(config) + _mlp(config)
    return total


def macs(config: ViTConfig) -> int:
    """Multiply-adds of one image: matrix products and convolutions, as the papers count them."""
    width, tokens, patches = config.width, config.tokens, config.patches
    linear = 4 * width * width + (3 if config.mlp == "swiglu" else 2) * width * config.hidden
    block = tokens * linear + 2 * tokens * tokens * width
    total = _patch_macs(config) + config.depth * block + _head_macs(config)
    if config.pool == "map":
        total += patches * (2 * width * width + 2 * width) + linear - 2 * width * width
    return total


def _attention(config: ViTConfig) -> int:
    return 4 * (config.width * config.width + config.width)


def _mlp(config: ViTConfig) -> int:
    first = 2 * config.hidden if config.mlp == "swiglu" else config.hidden
    return (config.width + 1) * first + (config.hidden + 1) * config.width


def _head(config: ViTConfig) -> int:
    if config.head == "none":
        return 0
    hidden = (config.width + 1) * config.width if config.head == "mlp" else 0
    return hidden + (config.width + 1) * config.classes * (2 if config.distilled else 1)


def _head_macs(config: ViTConfig) -> int:
    if config.head == "none":
        return 0
    hidden = config.width * config.width if config.head == "mlp" else 0
    return hidden + config.width * config.classes * (2 if config.distilled else 1)


def _patches(config: ViTConfig) -> int:
    if config.stem == "patch":
        return config.width * (config.channels * config.patch**2 + 1)
    convolutions = _convolutions(config)
    norms = sum(2 * outside for _, outside, _, _ in convolutions)
    return (
        sum(i * o * k * k for i, o, k, _ in convolutions)
        + norms
        + config.width * (convolutions[-1][1] + 1)
    )


def _patch_macs(config: ViTConfig) -> int:
    if config.stem == "patch":
        return config.patches * config.width * config.channels * config.patch**2
    height, width = config.size
    convolutions = _convolutions(config)
    resnet = sum(
        i * o * k * k * (height // step) * (width // step) for i, o, k, step in convolutions
    )
    return resnet + config.patches * config.width * convolutions[-1][1]


def _convolutions(config: ViTConfig) -> list[tuple[int, int, int, int]]:
    """Channels in and out, kernel, and pixels between two outputs, of each convolution."""
    found = [(config.channels, 64, 7, 2)]
    inside = 64
    for stage, depth in enumerate(STAGES[config.stem, config.patch]):
        outside, step = 256 * 2**stage, 4 * 2**stage
        narrow = outside // 4
        for block in range(depth):
            before = max(4, step // 2) if block == 0 else step
            if block == 0:
                found.append((inside, outside, 1, step))
            found += [
                (inside, narrow, 1, before),
                (narrow, narrow, 3, step),
                (narrow, outside, 1, step),
            ]
            inside = outside
    return found
