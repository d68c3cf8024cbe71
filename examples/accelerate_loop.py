"""A loop for Hugging Face's Accelerate, elastic: handwritten digits with a schedule, clipping and validation.

    python examples/accelerate_loop.py
    resile run examples/accelerate_loop.py --workers 3

Both end with the same parameters, bit for bit. Lines that a script for Accelerate would not have are marked with
`# Resile`.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import resile.training  # Resile
from resile.integrations.accelerate import Accelerator  # Resile: instead of accelerate's

EPOCHS = 5

resile.training.seed(0)  # Resile: instead of accelerate.utils.set_seed(0)
accelerator = Accelerator(cpu=True)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
training, held_out = random_split(dataset, [1500, 297])
loader = DataLoader(training, batch_size=64, shuffle=True)
validation = DataLoader(held_out, batch_size=128)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
model, optimizer, loader, validation, scheduler = accelerator.prepare(model, optimizer, loader, validation, scheduler)

for epoch in loader.epochs(EPOCHS):  # Resile: instead of range(EPOCHS)
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    correct = 0
    for inputs, targets in validation:
        with torch.no_grad():
            predictions = model(inputs).argmax(1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        correct += (predictions == targets).sum().item()
    accelerator.print(f"epoch {epoch}: loss {loader.loss:.3f}, validation accuracy {correct / len(held_out):.1%}")

accelerator.wait_for_everyone()
accelerator.save_model(model, tempfile.mkdtemp())
