"""A WeightedRandomSampler, made elastic by `prepare`: handwritten digits, of which some are rare and drawn more often.

    python examples/weighted_sampler.py
    resile run examples/weighted_sampler.py --workers 3

Both end with the same parameters, bit for bit. Lines that an ordinary script would not have are marked with `# Resile`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import resile.training  # Resile

EPOCHS = 5

resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
digits = load_digits()
inputs, targets = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
rare = (targets >= 5) & (torch.arange(len(targets)) % 10 > 0)  # of the digits from 5 on, one in ten is kept
dataset = TensorDataset(inputs[~rare], targets[~rare])
weights = 1 / torch.bincount(dataset.tensors[1]).float()
sampler = WeightedRandomSampler(weights[dataset.tensors[1]].tolist(), num_samples=960)
loader = DataLoader(dataset, batch_size=64, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader)  # Resile

for epoch in loader.epochs(EPOCHS):  # Resile: instead of range(EPOCHS)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        found = (model(inputs[rare]).argmax(1) == targets[rare]).float().mean()
    print(f"epoch {epoch}: loss {loader.loss:.3f}, accuracy on rare digits {found:.1%}")

if loader.is_lowest_rank:  # Resile
    torch.save(model.state_dict(), "digits.pt")
