"""The ResNet stem of hybrid models (BiT): group norm and weight-standardised convolutions."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


class StdConv2d(nn.Conv2d):
    """A convolution with weight standardisation: filters of mean 0, variance 1 (Qiao et al., 2019).

    It pads like TensorFlow's "SAME", with one more pixel right and below if the total is odd.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1):
        super().__init__(in_channels, out_channels, kernel, stride=stride, bias=False)
        padding = max(kernel - stride, 0)  # the stride divides the input, because the patch does
        self.same_padding = 2 * (padding // 2, padding - padding // 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)[None]  # standardised by batch norm with timm's eps
        weight = F.batch_norm(flat, None, None, training=True, eps=1e-8).view_as(self.weight)
        return F.conv2d(F.pad(x, self.same_padding), weight, stride=self.stride)


class ConvNorm(nn.Module):
    """A convolution followed by a group norm."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__()
        self.conv = StdConv2d(in_channels, out_channels, kernel, stride)
        self.norm = nn.GroupNorm(32, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut (He et al., 2016)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        hidden, same = out_channels // 4, in_channels == out_channels
        shortcut = nn.Identity() if same else ConvNorm(in_channels, out_channels, 1, stride)
        self.downsample = shortcut
        self.conv1, self.norm1 = StdConv2d(in_channels, hidden, 1), nn.GroupNorm(32, hidden)
        self.conv2, self.norm2 = StdConv2d(hidden, hidden, 3, stride), nn.GroupNorm(32, hidden)
        self.conv3, self.norm3 = StdConv2d(hidden, out_channels, 1), nn.GroupNorm(32, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class Stage(nn.Module):
    """Bottleneck blocks of one width; the first applies the stride."""

    def __init__(self, in_channels: int, out_channels: int, depth: int, stride: int):
        super().__init__()
        first = Bottleneck(in_channels, out_channels, stride)
        self.blocks = nn.Sequential(
            first, *(Bottleneck(out_channels, out_channels, 1) for _ in range(depth - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x


class ResNet(nn.Module):
    """Images to feature maps of `width` channels; stages have 256, 512, 1024 and 2048."""

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
        x = self.stages(x)  # (B, width, rows, columns)
        return x
