"""Situations of losses, computed in the body of the usual loop and in the model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from .situation import data, in_model, loss

CLASSES = torch.tensor([0.05, 0.95, 1.0, 1.0])


def half_labeled() -> TensorDataset:
    """The first quarter of the samples has no labels at all, as some others."""
    x, y = data().tensors
    y = y.clone()
    y[torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.4] = -100
    y[:24] = -100
    y[0::32] = 1
    return TensorDataset(x, y)


class Encoder(nn.Module):
    """It returns what it reconstructs, a mean and a logarithm of a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance = self.encode(inputs).chunk(2, 1)
        return self.decode(mean), mean, variance, inputs


@loss("the usual mean of a loss")
def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


@loss("weights of classes in `cross_entropy` (class_weight_mean.py)")
def class_weights(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, weight=CLASSES)


@loss("weights of classes and label smoothing")
def label_smoothing(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, weight=CLASSES, label_smoothing=0.1)


@loss("ignored targets, parts of a batch without any label (nan_shard_without_labels.py)", data=half_labeled)
def ignored_targets(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


@loss("a masked mean, divided by the sum of the mask", data=half_labeled)
def masked_mean(logits: Tensor, targets: Tensor) -> Tensor:
    mask = (targets >= 0).float()
    return (F.cross_entropy(logits, targets.clamp(0), reduction="none") * mask).sum() / mask.sum().clamp(min=1.0)


@loss("a sum divided by how many samples count, as a Python number", data=half_labeled)
def divided_by_count(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum") / max(1, int((targets >= 0).sum()))


@loss("the mean of selected samples", data=half_labeled)
def selected(logits: Tensor, targets: Tensor) -> Tensor:
    kept = targets >= 0
    return F.cross_entropy(logits[kept], targets[kept], reduction="none").mean()


@loss("a weight for each sample, divided by the sum of weights")
def sample_weights(logits: Tensor, targets: Tensor) -> Tensor:
    weights = CLASSES[targets]
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()


@loss("a sum over the batch")
def total(logits: Tensor, targets: Tensor) -> Tensor:
    return 1e-2 * F.cross_entropy(logits, targets, reduction="sum")


@loss("a sum divided by the rows of the batch")
def sum_by_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum") / len(logits)


@loss("a mean plus a sum")
def mean_plus_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets) + 1e-3 * logits.square().sum()


@loss("a mean with weights of classes plus a mean over samples")
def two_means(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, weight=CLASSES) + 0.1 * logits.square().mean()


@loss("`kl_div` with batchmean")
def batchmean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(1), F.one_hot(targets, 4).float() * 0.9 + 0.025, reduction="batchmean")


@loss("a VAE: sums of the reconstruction and of the divergence", Encoder)
def vae_of_sums(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    decoded, mean, variance, inputs = outputs
    return 1e-2 * ((decoded - inputs).square().sum() - 0.5 * (1 + variance - mean.square() - variance.exp()).sum())


@loss("a VAE: a mean of the reconstruction, a sum of the divergence divided by the rows", Encoder)
def vae_of_means(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    decoded, mean, variance, inputs = outputs
    divergence = -0.5 * (1 + variance - mean.square() - variance.exp()).sum() / len(inputs)
    return F.mse_loss(decoded, inputs) + 0.1 * divergence


@loss("the root of a mean (RMSE)")
def root_of_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(logits[:, 0], targets.float()).sqrt()


@loss("a ratio of sums (Dice)")
def dice(logits: Tensor, targets: Tensor) -> Tensor:
    found, truth = logits[:, 0].sigmoid(), targets.float()
    return 1 - 2 * (found * truth).sum() / (found.sum() + truth.sum())


@loss("the hardest samples of the batch (OHEM)")
def hardest(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none").topk(8).values.mean()


@loss("other samples of the batch as negatives (SimCLR, CLIP; simclr_negatives.py)")
def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    left, right = F.normalize(logits[:, :2], dim=1), F.normalize(logits[:, 2:], dim=1)
    return F.cross_entropy(left @ right.T / 0.5, torch.arange(len(left)))


@loss("triplets that are mined in the batch")
def triplets(logits: Tensor, targets: Tensor) -> Tensor:
    distances = torch.cdist(logits, logits)
    same = targets[:, None] == targets
    hardest = (distances * same).amax(1) - distances.masked_fill(same, 1e6).amin(1)
    return F.relu(hardest + 0.3).mean()


@loss("a correlation over the batch (Barlow Twins)")
def correlation(logits: Tensor, targets: Tensor) -> Tensor:
    left, right = ((half - half.mean(0)) / half.std(0) for half in logits.split(2, 1))
    return (left.T @ right / len(logits) - torch.eye(2)).square().sum()


@loss("load balancing: a product of means over the batch")
def balance(logits: Tensor, targets: Tensor) -> Tensor:
    shares = F.one_hot(logits.argmax(1), 4).float().mean(0)
    return F.cross_entropy(logits, targets) + 0.5 * (shares * logits.softmax(1).mean(0)).sum()


@loss("the mean of the batch subtracted from each row")
def centered(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits - logits.mean(0), targets)


@loss("an entropy of the mean prediction")
def diversity(logits: Tensor, targets: Tensor) -> Tensor:
    shares = logits.softmax(1).mean(0)
    return F.cross_entropy(logits, targets) + (shares * shares.log()).sum()


@loss("the largest loss of the batch")
def largest(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none").max()


@loss("a loss scaled by a detached mean of the batch")
def scaled_by_mean(logits: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(logits, targets, reduction="none")
    return (each / each.mean().detach()).mean()


IN_MODEL: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "mean_in_model": ("the usual mean", mean),
    "class_weights_in_model": ("weights of classes", class_weights),
    "total_in_model": ("a sum over the batch", total),
    "sum_by_rows_in_model": ("a sum divided by the rows", sum_by_rows),
    "mean_plus_sum_in_model": ("a mean plus a sum", mean_plus_sum),
    "two_means_in_model": ("means with different weights", two_means),
    "root_of_mean_in_model": ("the root of a mean", root_of_mean),
    "dice_in_model": ("a ratio of sums", dice),
    "hardest_in_model": ("the hardest samples", hardest),
    "contrastive_in_model": ("other samples as negatives", contrastive),
    "triplets_in_model": ("triplets that are mined", triplets),
    "balance_in_model": ("load balancing", balance),
    "centered_in_model": ("the mean of the batch subtracted", centered),
}
for name, (text, of_logits) in IN_MODEL.items():
    in_model(f"in the model: {text}", of_logits, name)
