"""The ResNet before a hybrid's transformer: group norm and standardised convolutions."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


class StdConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 (Qiao et al., 2019).

    It pads as TensorFlow does, more on the right where the padding is odd.
    """

    def __init__(self, inside: int, outside: int, kernel: int, stride: int = 1):
        super().__init__(inside, outside, kernel, stride=stride, bias=False)
        padding = max(kernel - stride, 0)  # sides are even here, for the patch divides the image
        self.pads = 2 * (padding // 2, padding - padding // 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)[None]
        weight = F.batch_norm(flat, None, None, training=True, eps=1e-8).view_as(
            self.weight
        )  # as timm has it
        return F.conv2d(F.pad(x, self.pads), weight, stride=self.stride)


class ConvNorm(nn.Module):
    """A convolution and its group norm."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int):
        super().__init__()
        self.conv = StdConv2d(inside, outside, kernel, stride)
        self.norm = nn.GroupNorm(32, outside)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x


class Bottleneck(nn.Module):
    """Narrow, look around, widen, add (He et al., 2016)."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        narrow = outside // 4
        self.downsample = (
            nn.Identity() if inside == outside else ConvNorm(inside, outside, 1, stride)
        )
        self.conv1, self.norm1 = StdConv2d(inside, narrow, 1), nn.GroupNorm(32, narrow)
        self.conv2, self.norm2 = StdConv2d(narrow, narrow, 3, stride), nn.GroupNorm(32, narrow)
        self.conv3, self.norm3 = StdConv2d(narrow, outside, 1), nn.GroupNorm(32, outside)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class Stage(nn.Module):
    """Bottlenecks of one width; the first halves the picture."""

    def __init__(self, inside: int, outside: int, depth: int, stride: int):
        super().__init__()
        first = Bottleneck(inside, outside, stride)
        self.blocks = nn.Sequential(
            first, *(Bottleneck(outside, outside, 1) for _ in range(depth - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x


class ResNet(nn.Module):
    """Pixels to a small map of wide features; its stages are 256, 512, 1024 and 2048 wide."""

    def __init__(self, channels: int, depths: Sequence[int]):
        super().__init__()
        widths = [64] + [256 * 2**i for i in range(len(depths))]
        self.width = widths[-1]
        self.stem = ConvNorm(channels, 64, 7, 2)
        self.stages = nn.Sequential(
            *(
                Stage(widths[i], widths[i + 1], depth, 1 if i == 0 else 2)
                for i, depth in enumerate(depths)
            )
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        x = F.relu(self.stem(x))  # (B, 64, H / 2, W / 2)
        x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, stride=2)  # (B, 64, H / 4, W / 4)
        x = self.stages(x)  # (B, channels, rows, columns)
        return x
