"""A generator and a discriminator, each with an optimizer of its own, made elastic by `prepare`: points on a circle.

    python examples/gan.py
    resile run examples/gan.py --workers 3

Both end with the same parameters, bit for bit. Lines that an ordinary script would not have are marked with `# Resile`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training  # Resile

EPOCHS = 3

resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
angles = 2 * torch.pi * torch.rand(1920)
loader = DataLoader(TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1)), batch_size=96, shuffle=True)

generator = nn.Sequential(
    nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
)
discriminator = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
first = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
second = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
models = [discriminator, generator]
_, (first, second), loader = resile.training.prepare(models, [first, second], loader)  # Resile

for epoch in loader.epochs(EPOCHS):  # Resile: instead of range(EPOCHS)
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 8))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        first.zero_grad()
        on_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        on_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        loss = on_real + on_fake
        loss.backward()  # type: ignore[no-untyped-call]
        first.step()

        second.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        loss.backward()  # type: ignore[no-untyped-call]
        second.step()
    with torch.no_grad():
        radius = generator(torch.randn(1000, 8)).norm(dim=1)
    print(f"epoch {epoch}: the radius of generated points is {radius.mean():.3f} +- {radius.std():.3f}")

if loader.is_lowest_rank:  # Resile
    torch.save(generator.state_dict(), "generator.pt")
