"""A probe step: the bits of a small forward and backward pass.

They tell apart machines, settings and libraries that round differently.

It uses the kernels whose choice depends on the processor and on the environment: convolution and matrix product in
several precisions, attention, normalisation, reductions and transcendental functions. It draws no random numbers and
takes some 20 ms on a CPU.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def probe_digest(device: torch.device) -> str:
    """Compute a sha256, in hex, of the gradients of the probe step on ``device``, with the settings as they are.

    Never call it in a process that forks afterwards: a child would wait for threads that only its parent has.
    """
    with _deterministic(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        inputs = [_numbers(shape, device) for shape in ((2, 8, 12, 12), (16, 8, 3, 3), (192, 193), (193, 64), (64,))]
        loss = _loss(*inputs)
        gradients = torch.autograd.grad(loss, inputs)
    sha = hashlib.sha256()
    for tensor in (loss.detach(), *gradients):
        sha.update(tensor.cpu().contiguous().numpy().data)
    return sha.hexdigest()


def _loss(images: Tensor, filters: Tensor, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    planes = F.batch_norm(F.conv2d(images, filters, padding=1), None, None, training=True)
    in_rows = F.conv2d(_channels_last(images), _channels_last(filters))
    rows = F.layer_norm(F.gelu(left @ right), (64,), scale)
    halves = rows.to(torch.bfloat16) @ right[:64].to(torch.bfloat16)
    heads = rows.reshape(1, 2, 96, 64)
    attention = F.scaled_dot_product_attention(heads, heads, heads)
    sums = (
        torch.tanh(planes).square().mean(),
        in_rows.std(),
        torch.logsumexp(rows, 1).sum(),
        halves.float().softmax(1).square().sum(),
        torch.exp(-attention.abs()).sum(),
        (rows.double() @ right[:64].double()).sin().sum(),
    )
    return torch.stack([part.float() for part in sums]).sum()


def _numbers(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Make numbers between -1.3 and 1.3 that are exact in float32."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.int64, device=device) * 7919 % 1009 - 504
    return (numbers.to(torch.float32) / 384).reshape(shape).requires_grad_()


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` imports the compiler, for a second
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
