"""`python -m nblaunch demo`: train a small classifier of handwritten digits on two ranks.

The data is scikit-learn's own `load_digits`: 1797 images of 8 x 8 pixels, no download. Each rank sees
its half of the training images; DistributedDataParallel averages the gradients, so both end with the
same parameters.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Images = tuple[torch.Tensor, torch.Tensor]  # pixels: (n, 64) floats in 0..1; labels: (n,) ints

NPROC = 2
EPOCHS = 20
BATCH_SIZE = 32
TEST_IMAGES = 360
SEED = 0
LEAST_ACCURACY = 0.95


@dataclass(frozen=True, slots=True)
class TrainedRank:
    """What one rank returns; `accuracy` is that of all test images, counted by all ranks."""

    device: str
    samples: int
    steps: int
    loss: float
    accuracy: float
    checksum: str


def demo() -> int:
    """Train on two ranks, print a row per rank, and return 0 if the result is right, else 1."""
    if importlib.util.find_spec("sklearn") is None:
        return _fail("the demo needs scikit-learn for its data: pip install 'nblaunch[demo]'")
    import nblaunch

    print(f"Training a classifier of handwritten digits on {NPROC} ranks ...", flush=True)
    started = time.monotonic()
    try:
        result = nblaunch.run(train, nproc=NPROC)
    except nblaunch.NblaunchError as error:
        return _fail(str(error))
    reports: list[TrainedRank] = result.values
    print(_table(reports))
    accuracy = min(report.accuracy for report in reports)
    if len({report.checksum for report in reports}) != 1:
        return _fail("the ranks ended with different parameters; DDP should have kept them equal")
    if accuracy < LEAST_ACCURACY:
        return _fail(f"test accuracy {accuracy:.4f} is below {LEAST_ACCURACY}")
    seconds = time.monotonic() - started
    print(f"Test accuracy {accuracy:.4f}, equal parameters on all ranks, {seconds:.1f} s.")
    return 0


def train() -> TrainedRank:
    import torch
    from torch import distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    device = _device()
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    measure = nn.CrossEntropyLoss()

    training, test = digits()
    dataset = TensorDataset(*training)
    sampler: DistributedSampler[Sequence[torch.Tensor]] = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    steps, mean_loss = 0, float("nan")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            loss = measure(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        steps += len(losses)
        mean_loss = sum(losses) / len(losses)

    images, labels = (part[dist.get_rank() :: dist.get_world_size()].to(device) for part in test)
    with torch.no_grad():
        right = (network(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return TrainedRank(
        device=str(device),
        samples=len(sampler),
        steps=steps,
        loss=mean_loss,
        accuracy=right.item() / len(test[0]),
        checksum=checksum(network),
    )


def digits() -> tuple[Images, Images]:
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    training, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return (pixels[training], labels[training]), (pixels[test], labels[test])


def checksum(network: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _device() -> torch.device:
    """Return a GPU of this rank's own where there is one for each rank, else the CPU."""
    import torch

    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def _table(reports: Sequence[TrainedRank]) -> str:
    rows: list[tuple[str, ...]] = [
        ("rank", "device", "samples", "steps", "final loss", "test accuracy", "parameters")
    ]
    for rank, report in enumerate(reports):
        counts = str(report.samples), str(report.steps)
        figures = f"{report.loss:.4f}", f"{report.accuracy:.4f}"
        rows.append((str(rank), report.device, *counts, *figures, report.checksum))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows
    )


def _fail(why: str) -> int:
    print(f"nblaunch demo: {why}", file=sys.stderr)
    return 1
