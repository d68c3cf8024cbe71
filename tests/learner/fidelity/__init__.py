"""Situations of training scripts, each run as plain PyTorch and in each elastic way: see docs/fidelity.md."""
