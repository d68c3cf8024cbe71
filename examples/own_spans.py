"""Spans of the script's own, with OpenTelemetry: they continue the trace in which the pool started the worker.

    python examples/own_spans.py
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 resile up
    resile submit examples/own_spans.py

Each worker adds a span for each epoch that it has seen begin: see docs/traces.md.
"""

import os

import torch
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training

EPOCHS = 3

provider = TracerProvider()  # its resource has the job, the worker and the host, by OTEL_RESOURCE_ATTRIBUTES
if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("digits")
start = trace.get_current_span(extract({"traceparent": os.environ.get("TRACEPARENT", "")}))

resile.training.seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
loader = DataLoader(dataset, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader)

for epoch in loader.epochs(EPOCHS):
    with tracer.start_as_current_span("epoch", context=trace.set_span_in_context(start)) as span:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        span.set_attributes({"epoch": epoch, "loss": loader.loss})
    print(f"epoch {epoch}: loss {loader.loss:.3f}")
