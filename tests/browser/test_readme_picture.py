"""The pictures at the top of the README are of a real run; docs/testing.md says how to make them."""

from __future__ import annotations

import re

import pytest

from .conftest import ROOT, SCREENSHOTS
from .front import DARK, LIGHT, PATIENCE_WITH_PAGES, Front, expect

MOST_BYTES = 300_000
NOTEBOOK = """
import sys, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm
from nblaunch._demo import digits

training, test = digits()
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

def train_epoch(model, optimizer):
    images, labels = training
    total = torch.zeros(1)
    for start in range(0, len(labels) - 63, 64):
        part = slice(start + dist.get_rank(), start + 64, dist.get_world_size())
        loss = torch.nn.functional.cross_entropy(model(images[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / (len(labels) // 64) / dist.get_world_size()

def progress(images):
    shape = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
    look = {"ascii": "─━", "bar_format": shape, "ncols": 44}
    return tqdm(images, "testing", file=sys.stdout, mininterval=0, **look)

def is_right(image):
    rank, step = image % 4, image // 4
    if step == {1: 41, 3: 73}.get(rank):  # the picture is taken here
        taken = threading.Thread(target=wait_for, args=("end",))
        taken.start()
        while taken.is_alive():
            network(test[0])
    return (network(test[0][image]).argmax() == test[1][image]).item()
"""
CELL = """
%%distributed -n 4 --out accuracy
model = DDP(network)  # network, train_epoch, ... come from the notebook
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(1, 5):
    loss = train_epoch(model, optimizer)
    print(f"epoch {epoch}: loss {loss:.3f}")
right = [is_right(image) for image in progress(range(rank, 360, world_size))]
round(sum(right) / len(right), 3)
"""
BORDER = 3
"""Pixels of the line around the cell that is chosen."""
PICTURES = {"live-panel.png": LIGHT, "live-panel-dark.png": DARK}
"""In `SCREENSHOTS`, and in `notebooks` those that the README shows."""


@pytest.fixture
def front(chromium, server, gates):
    """Give a page of its own: as narrow as the README shows it, and twice as sharp."""
    context = chromium.new_context(viewport={"width": 860, "height": 1000}, device_scale_factor=2)
    front = Front("lab", context.new_page(), server, SCREENSHOTS)
    front.open_new("readme.ipynb")
    front.command("application:toggle-left-area")
    front.run("%load_ext nblaunch", gates.waiting, NOTEBOOK)
    yield front
    gates.open_all()
    front.finished()
    gates.shut_all()
    server.end_kernels("readme.ipynb")
    context.close()


@pytest.mark.slow
def test_the_pictures_of_the_readme_show_ranks_progress_folded_output_and_values(front, gates):
    gates.wait()
    front.start(CELL)
    trained = re.compile(r"\[ranks 0-3\]\s*epoch 4: loss \d")
    expect(front.output).to_contain_text(trained, timeout=PATIENCE_WITH_PAGES)
    for rank, last in enumerate(["→ 0.", "46%", "→ 0.", "81%"]):
        card = front.panel.get_by_role("article", name=f"Rank {rank}", exact=True)
        expect(card).to_contain_text(last)
        if last.endswith("%"):
            expect(card).to_contain_text(re.compile(r"CPU \d\d+ %"))
    SCREENSHOTS.mkdir(exist_ok=True)
    for name, theme in PICTURES.items():
        front.theme(theme)
        cell = front.page.locator(".jp-Cell").last.bounding_box()
        inside = {
            **{side: cell[side] + BORDER for side in ("x", "y")},
            **{size: cell[size] - 2 * BORDER for size in ("width", "height")},
        }
        front.page.screenshot(path=SCREENSHOTS / name, clip=inside)
        assert (SCREENSHOTS / name).stat().st_size < MOST_BYTES
    front.theme()


@pytest.mark.parametrize("name", PICTURES)
def test_the_readmes_pictures_are_in_the_repository_and_small(name):
    assert 10_000 < (ROOT / "notebooks" / name).stat().st_size < MOST_BYTES
