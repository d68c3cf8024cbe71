"""A package that the pool does not have: einops cuts handwritten digits into patches for a small transformer.

    python examples/packages.py                          # einops is installed
    resile run examples/packages.py --workers 3 --with 'einops>=0.7'
    resile submit examples/packages.py --with 'einops>=0.7'

All end with the same parameters, bit for bit. Lines that an ordinary script would not have are marked with `# Resile`.
"""

import torch
from einops import rearrange  # type: ignore[import-not-found, unused-ignore]
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training  # Resile


class Patches(nn.Module):
    """A transformer over the 16 patches of an image of 8x8 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.places = nn.Parameter(torch.zeros(16, width))
        self.layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 8, 8] to logits [batch, 10]."""
        patches = rearrange(images, "b (h p) (w q) -> b (h w) (p q)", p=2, q=2)
        hidden: Tensor = self.layer(self.embed(patches) + self.places)
        return torch.as_tensor(self.head(hidden.mean(1)))


resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.images).float() / 16, torch.tensor(digits.target))
loader = DataLoader(dataset, batch_size=96, shuffle=True)

model = Patches()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader)  # Resile

for epoch in loader.epochs(2):  # Resile: instead of range(2)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(f"epoch {epoch}: loss {loader.loss:.3f}")
