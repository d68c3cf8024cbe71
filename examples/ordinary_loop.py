"""An ordinary loop made elastic by `prepare`: handwritten digits with a schedule, clipping and the best model.

    python examples/ordinary_loop.py
    resile run examples/ordinary_loop.py --workers 3

Both end with the same parameters, bit for bit. Lines that an ordinary script would not have are marked with `# Resile`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import resile.training  # Resile

EPOCHS = 5

resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
training, held_out = random_split(dataset, [1500, 297])
loader = DataLoader(training, batch_size=64, shuffle=True)
validation = DataLoader(held_out, batch_size=128)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
model, optimizer, loader, scheduler = resile.training.prepare(model, optimizer, loader, scheduler)  # Resile
best = 0

for epoch in loader.epochs(EPOCHS):  # Resile: instead of range(EPOCHS)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in validation)
    print(f"epoch {epoch}: loss {loader.loss:.3f}, validation accuracy {correct / len(held_out):.1%}")
    if correct > best:
        best = correct
        if loader.is_lowest_rank:  # Resile
            torch.save(model.state_dict(), "digits.pt")
