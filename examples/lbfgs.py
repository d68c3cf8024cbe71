"""LBFGS, whose line search evaluates a closure several times a step, made elastic by `prepare`: handwritten digits.

    python examples/lbfgs.py
    resile run examples/lbfgs.py --workers 3

Both end with the same parameters, bit for bit. Lines that an ordinary script would not have are marked with `# Resile`.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import resile.training  # Resile

EPOCHS = 4

resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
training, held_out = random_split(dataset, [1500, 297])
loader = DataLoader(training, batch_size=500, shuffle=True)

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, history_size=10, line_search_fn="strong_wolfe")
model, optimizer, loader = resile.training.prepare(model, optimizer, loader)  # Resile

for epoch in loader.epochs(EPOCHS):  # Resile: instead of range(EPOCHS)
    for inputs, targets in loader:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in DataLoader(held_out, 99))
    print(f"epoch {epoch}: loss {loader.loss:.4f}, accuracy {correct / len(held_out):.1%}")

if loader.is_lowest_rank:  # Resile
    torch.save(model.state_dict(), "digits.pt")
