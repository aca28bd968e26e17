"""What transformers, Lightning and tqdm log is in `result.metrics`, without a word in the user's code."""

from __future__ import annotations

import importlib.metadata
import os
from collections import defaultdict
from typing import Any

import pytest
from lanes import needs, slow

import nblaunch

pytestmark = pytest.mark.quick


def points(result, name):
    """Return the points of a name, by rank: (step, value)."""
    found = defaultdict(list)
    for each in result.metrics.of(name) if name in result.metrics.names else ():
        found[each.rank].append((each.step, each.value))
    return dict(found)


def version(library):
    return f"{library} {importlib.metadata.version(library)} gives no such points"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Give a session whose ranks write nothing but below a directory of the test's, and use no network."""
    place = str(tmp_path_factory.mktemp("libraries"))
    offline = {"HF_HOME": place, "HF_HUB_OFFLINE": "1", "TORCH_HOME": place}
    with nblaunch.Session(2, env=offline) as session:
        session.cell(f"import os\nos.chdir({place!r})")
        yield session


def bars(rank_logs):
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    rank = int(os.environ["RANK"])
    for epoch in range(2):
        bar = tqdm(range(3), disable=rank > 0)
        for number in bar:
            loss = 10 * epoch + number + rank / 2
            bar.set_postfix(loss=loss, lr=f"{0.1:.1e}", phase="warm")
            if rank_logs:
                nblaunch.log(step=number, loss=-loss)


def test_the_postfix_of_a_bar_is_logged_also_where_the_bar_is_switched_off(session):
    result = session.run(bars, (False,))
    first = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 10.0), (4, 11.0), (5, 12.0)]
    assert points(result, "loss") == {0: first, 1: [(step, loss + 0.5) for step, loss in first]}
    assert points(result, "lr") == {rank: [(step, 0.1) for step in range(6)] for rank in range(2)}
    assert result.metrics.names == ("loss", "lr")


def test_what_the_program_logs_itself_is_not_logged_twice(session):
    result = session.run(bars, (True,))
    assert [len(each) for each in points(result, "loss").values()] == [6, 6]
    assert all(value <= 0 for each in points(result, "loss").values() for _, value in each)


@pytest.mark.full
def test_no_points_are_taken_where_the_environment_says_so():
    assert nblaunch.run(bars, (False,), nproc=2, env={"NBLAUNCH_LOGGERS": "0"}).metrics.names == ()


def train_with_transformers():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **size))
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(32)[:, None] + torch.arange(8)) % 16]
    arguments = TrainingArguments(
        output_dir="transformers",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        logging_steps=2,
        eval_strategy="epoch",
        report_to=[],
        save_strategy="no",
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return [
        (name, entry["step"], value)
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if name in {"loss", "eval_loss", "learning_rate", "grad_norm", "train_loss"}
    ]


@pytest.mark.full
def test_what_the_trainer_of_transformers_gives_its_callbacks_is_logged_by_each_rank_once(session):
    needs("transformers", "accelerate")
    result = session.run(train_with_transformers)
    for rank, history in enumerate(result.values):
        logged = [
            (each.name, each.step, pytest.approx(each.value)) for each in result.metrics if each.rank == rank
        ]
        assert sorted(logged, key=lambda each: each[:2]) == sorted(history), version("transformers")
        assert {name for name, *_ in history} == {
            *("loss", "eval_loss", "learning_rate", "grad_norm", "train_loss")
        }
        assert [step for name, step, _ in history if name == "loss"] == [2, 4, 6, 8]


def train_with_lightning(package):
    import importlib
    import logging
    import warnings

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    pl: Any = importlib.import_module(package)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.line, self.losses = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _):
            loss = self.line(batch[0]).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss, prog_bar=True)
            self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    model = Model()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=2, log_every_n_steps=1, **quiet
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.rand(32, 1)), batch_size=4))
    return model.losses


@pytest.mark.full
@pytest.mark.parametrize("package", ["lightning", slow("pytorch_lightning")])
def test_what_lightning_logs_is_logged_by_each_rank_once_beside_its_bar_and_without_a_logger(
    session, package
):
    needs(package)
    result = session.run(train_with_lightning, (package,))
    losses = points(result, "loss")
    assert losses == {
        rank: [(step, pytest.approx(loss)) for step, loss in enumerate(values)]
        for rank, values in enumerate(result.values)
    }, version(package)
    assert losses[0] != losses[1]
    assert [[step for step, _ in each] for each in points(result, "epoch_loss").values()] == [[3, 7]] * 2
    assert set(result.metrics.names) == {"loss", "epoch_loss"}


def log_with_fabric(package):
    import importlib

    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    for step in range(3):
        fabric.log("loss", fabric.global_rank + step, step=10 * step)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning", "lightning_fabric"])
def test_what_fabric_logs_is_logged(session, package):
    needs(package)
    result = session.run(log_with_fabric, (package,))
    expected = {rank: [(10 * step, float(rank + step)) for step in range(3)] for rank in range(2)}
    assert points(result, "loss") == expected, version(package)
