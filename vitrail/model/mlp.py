"""The MLP of a block: what each token computes on its own."""

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.config import MlpKind


class Mlp(nn.Module):
    """Two linear layers with an activation between them, applied to each token separately."""

    def __init__(self, width: int, hidden: int, kind: MlpKind, dropout: float = 0.0):
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(width, 2 * hidden if kind == "swiglu" else hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        x = self.activation(self.fc1(x))  # (B, N, M)
        x = self.dropout(self.fc2(self.dropout(x)))  # (B, N, D)
        return x

    def activation(self, x: Tensor) -> Tensor:
        """GELU or an approximation; or SwiGLU, where half of the channels gate the others.

        CLIP approximates GELU by a sigmoid (Hendrycks and Gimpel, 2016); SwiGLU: Shazeer, 2020.
        """
        if self.kind == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return F.silu(gate) * x
        if self.kind == "quick_gelu":
            return x * (1.702 * x).sigmoid()
        return F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none")
