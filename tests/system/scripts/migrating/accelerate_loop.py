"""A script for Hugging Face's Accelerate, for a table of docs/migrating.md."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
inputs = torch.randn(96, 4)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = DataLoader(dataset, batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
epochs = 3
for epoch in range(epochs):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean()
    accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")
accelerator.save_model(model, tempfile.mkdtemp())
