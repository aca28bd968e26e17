"""Libraries that bring a launcher of their own find ours, and run unchanged: nothing here is written for us.

Each program trains for a moment on two ranks and says what it saw; what must be true of any training on
two ranks is then checked: the data were split, the loss fell, and both ranks hold the same parameters.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import shutil
import sysconfig
from pathlib import Path

import pytest
from lanes import needs, sampled

import nblaunch

ITEMS = 32

# What a notebook defines first. Ranks get it with the cell that uses it.
NOTEBOOK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Line(Dataset):
    "Points of y = 3x + 1, and which of them were asked for."
    def __init__(self):
        self.seen = []
    def __len__(self):
        return 32
    def __getitem__(self, index):
        self.seen.append(index)
        x = torch.tensor([index / 32])
        return x, 3 * x + 1

def facts(data, losses, model):
    first_epoch = data.seen[:len(data) // 2]
    weights = {name: weight.tolist() for name, weight in model.state_dict().items()}
    return {"seen": first_epoch, "losses": losses, "weights": weights}
"""


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path, kernel, monkeypatch):
    """Work in an empty directory, with empty caches, without the network; all is empty at the end too."""
    place = tmp_path / "empty"
    place.mkdir()
    variables = {
        "HF_HOME": str(place / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TORCH_HOME": str(place / "torch"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place)
    kernel.ok(f"import os; os.environ.update({variables!r}); os.chdir({str(place)!r})")
    yield
    kernel.ok(f"import os; os.chdir({str(tmp_path)!r})")
    assert [str(path.relative_to(place)) for path in place.rglob("*")] == []


@pytest.fixture
def notebook(kernel):
    """Give the kernel with the notebook's own definitions."""
    kernel.ok(NOTEBOOK)
    return kernel


def must_have_trained(values):
    """Check what is true of every training on two ranks."""
    first, second = values
    assert sorted([*first["seen"], *second["seen"]]) == list(range(ITEMS))
    for losses in (first["losses"], second["losses"]):
        half = len(losses) // 2
        assert half > 0
        assert all(math.isfinite(loss) for loss in losses)
        assert sum(losses[half:]) < sum(losses[:half])
    assert first["weights"] == second["weights"]


# --- libraries with launchers ----------------------------------------------------------------------


ACCELERATE = """
from accelerate import Accelerator

torch.manual_seed(rank)  # preparing the model gives all ranks the weights of rank 0
accelerator, data, losses = Accelerator(cpu=True), Line(), []
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
"""

ACCELERATE_EPOCHS = """
for epoch in range(4):
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
everyone = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
{**facts(data, losses, accelerator.unwrap_model(model)), "everyone": everyone}
"""


def test_accelerate_trains_in_a_cell(notebook):
    needs("accelerate")
    notebook.ok("%%distributed -n 2 --out res\n" + ACCELERATE + ACCELERATE_EPOCHS)
    values = notebook.value("res.values")
    must_have_trained(values)
    assert [value["everyone"] for value in values] == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_the_cell_of_the_page_about_cells_runs(notebook):
    needs("accelerate")
    notebook.ok("model, batches = nn.Linear(1, 1), DataLoader(Line(), batch_size=4)")
    page = (Path(__file__).parents[2] / "notebooks" / "docs" / "cells.md").read_text()
    (cell,) = re.findall(r"^```python\n(%%distributed[^`]* Accelerator[^`]*)^```$", page, re.MULTILINE)
    notebook.ok(cell.replace("-n 2", "-n 2 --out res") + "accelerator.num_processes, len(batches)")
    assert notebook.value("res.values") == [[2, 4], [2, 4]]


@pytest.mark.parametrize("strategy", sampled(["ddp", "auto"], ci=1))
def test_lightning_finds_the_ranks_and_starts_none(notebook, tmp_path, strategy):
    """In what it takes for a notebook Lightning refuses `ddp`, and its own choice is to fork."""
    needs("lightning")
    notebook.ok(
        f"""
        %%distributed -n 2 --out res
        import os
        import lightning
        import psutil

        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.line = nn.Linear(1, 1)
                self.losses, self.others = [], []

            def training_step(self, batch, index):
                x, y = batch
                loss = nn.functional.mse_loss(self.line(x), y)
                self.losses.append(loss.item())
                self.others += psutil.Process().children()
                self.log("loss", loss, sync_dist=True)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        before = os.getpid()
        torch.manual_seed(rank)
        data, model = Line(), Model()
        trainer = lightning.Trainer(
            strategy={strategy!r}, accelerator="cpu", devices=2, max_epochs=4, log_every_n_steps=1,
            logger=False, default_root_dir={str(tmp_path / "root")!r},
        )
        trainer.fit(model, DataLoader(data, batch_size=4))
        {{
            **facts(data, model.losses, model),
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "ranks": [trainer.global_rank, trainer.world_size],
            "processes": [os.getpid() - before, len(model.others)],
        }}
        """
    )
    values = notebook.value("res.values")
    must_have_trained(values)
    assert [value["environment"] for value in values] == ["TorchElasticEnvironment"] * 2
    assert [value["ranks"] for value in values] == [[0, 2], [1, 2]]
    assert [value["processes"] for value in values] == [[0, 0]] * 2
    assert len(list((tmp_path / "root").rglob("*.ckpt"))) == 1


@pytest.mark.slow
def test_lightning_fabric_finds_the_ranks_in_a_function():
    needs("lightning")

    def train():
        import torch
        from lightning.fabric import Fabric
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        torch.manual_seed(fabric.global_rank)
        line = nn.Linear(1, 1)
        model, optimizer = fabric.setup(line, torch.optim.SGD(line.parameters(), lr=0.1))
        x = torch.arange(ITEMS) / ITEMS
        batches = DataLoader(TensorDataset(torch.arange(ITEMS), x[:, None], 3 * x[:, None] + 1), batch_size=4)
        batches = fabric.setup_dataloaders(batches)
        seen, losses = [], []
        for _ in range(4):
            for indices, inputs, targets in batches:
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen += indices.tolist()
                losses.append(loss.item())
        weights = [weight.tolist() for weight in line.parameters()]
        return {"seen": seen[: ITEMS // 2], "losses": losses, "weights": weights, "rank": fabric.global_rank}

    values = nblaunch.run(train, nproc=2).values
    must_have_trained(values)
    assert [value["rank"] for value in values] == [0, 1]


def train_with_transformers(output_dir):
    import torch
    from torch.utils.data import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Counting(Dataset[dict[str, torch.Tensor]]):
        def __init__(self):
            self.seen = []

        def __len__(self):
            return ITEMS

        def __getitem__(self, index):
            self.seen.append(index)
            ids = (index + torch.arange(8)) % 16
            return {"input_ids": ids, "labels": ids}

    torch.manual_seed(int(os.environ["RANK"]))
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=16, **size))
    data = Counting()
    arguments = TrainingArguments(
        output_dir=output_dir,
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return {
        "seen": data.seen[: ITEMS // 2],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: weight.tolist() for name, weight in model.state_dict().items()},
        "ranks": (arguments.process_index, arguments.world_size),
        "mode": arguments.parallel_mode.value,
    }


def test_transformers_trainer_trains_in_a_cell(notebook, tmp_path):
    needs("transformers", "accelerate")
    notebook.ok(f"import os\nITEMS = {ITEMS}\n{inspect.getsource(train_with_transformers)}")
    notebook.ok(f"%%distributed -n 2 --out res\ntrain_with_transformers({str(tmp_path / 'out')!r})")
    values = notebook.value("res.values")
    must_have_trained(values)
    assert [value["ranks"] for value in values] == [[0, 2], [1, 2]]
    assert [value["mode"] for value in values] == ["distributed"] * 2


# --- torch's own -----------------------------------------------------------------------------------


def train_sharded():
    """Train with FSDP2, and the same without on all of the data."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def step(model, optimizer, x):
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    sharded, whole = model(), model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (sharded, whole)]
    x = torch.randn(ITEMS, 4)
    mine = x.chunk(2)[dist.get_rank()]
    losses = [step(sharded, optimizers[0], mine) for _ in range(10)]
    for _ in range(10):
        step(whole, optimizers[1], x)
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    return {
        "losses": losses,
        "held": [tuple(weight.to_local().shape) for weight in sharded.parameters()],
        "same": all(torch.allclose(one.full_tensor(), other, atol=1e-6) for one, other in pairs),
    }


def test_fsdp2_trains_shards_as_one_process_trains_the_whole(kernel):
    kernel.ok(f"ITEMS = {ITEMS}\n{inspect.getsource(train_sharded)}")
    kernel.ok("%%distributed -n 2 --out res\ntrain_sharded()")
    values = kernel.value("res.values")
    for value in values:
        assert value["losses"][-1] < value["losses"][0]
        assert value["same"]
    held = [[tuple(shape) for shape in value["held"]] for value in values]
    assert held == [[(4, 4), (4,), (1, 8), (1,)], [(4, 4), (4,), (0, 8), (0,)]]


def test_a_device_mesh_splits_a_model_over_the_ranks(notebook):
    notebook.ok(
        """
        %%distributed -n 2 --out res
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(0)
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("tp",))
        x, ones = torch.randn(8, 4), torch.ones(4, 3)
        product = distribute_tensor(x, mesh, [Shard(0)]) @ distribute_tensor(ones, mesh, [Replicate()])

        plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        split = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        split.load_state_dict(plain.state_dict())
        split = parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        losses = {"plain": [], "split": []}
        for name, model in {"plain": plain, "split": split}.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
        {
            "rows": list(product.to_local().shape),
            "product": torch.allclose(product.full_tensor(), x @ ones),
            "held": list(split[0].weight.to_local().shape),
            **losses,
        }
        """
    )
    for value in notebook.value("res.values"):
        assert value["rows"] == [4, 3]
        assert value["product"]
        assert value["held"] == [4, 4]
        assert value["split"] == pytest.approx(value["plain"], abs=1e-5)
        assert value["split"][-1] < value["split"][0]


def test_a_mesh_of_two_dimensions_has_groups_of_its_own(kernel):
    kernel.ok(
        """
        %%distributed -n 4 --out res
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sums = []
        for name in ("dp", "tp"):
            one = torch.tensor([10 ** rank])
            dist.all_reduce(one, group=mesh[name].get_group())
            sums.append(one.item())
        sums
        """
    )
    assert kernel.value("res.values") == [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def test_a_sharded_checkpoint_is_loaded_by_other_ranks_and_by_the_notebook(notebook, tmp_path):
    notebook.ok(
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard

        def sharded(seed):
            torch.manual_seed(seed)
            model = nn.Linear(4, 8)
            fully_shard(model)
            return model, torch.optim.Adam(model.parameters())

        def step(model, optimizer):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return model.weight.full_tensor().tolist()

        def state_of(model, optimizer):
            model_state, optimizer_state = get_state_dict(model, optimizer)
            return {"model": model_state, "optimizer": optimizer_state}
        """
    )
    notebook.ok(
        f"""
        %%distributed -n 2 --out saved
        model, optimizer = sharded(0)
        step(model, optimizer)
        dcp.save(state_of(model, optimizer), checkpoint_id={str(tmp_path / "checkpoint")!r})
        step(model, optimizer)
        """
    )
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 2
    for ranks in (2, 3):
        notebook.ok(
            f"""
            %%distributed -n {ranks} --out loaded
            model, optimizer = sharded(1)
            step(model, optimizer)
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id={str(tmp_path / "checkpoint")!r})
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            step(model, optimizer)
            """
        )
        # The step after the checkpoint is the same, which needs Adam's own state too.
        assert notebook.value("loaded.values") == notebook.value("saved.values") + [
            notebook.value("saved[0]")
        ] * (ranks - 2)


@pytest.mark.slow
def test_torchmetrics_reduces_over_the_ranks(notebook):
    needs("torchmetrics")
    notebook.ok(
        """
        %%distributed -n 2 --out res
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

        mean = MeanMetric()
        mean.update(torch.arange(8.0)[rank::world_size])
        guesses, truth = torch.tensor([0, 1, 2, 2, 1, 0, 0]), torch.tensor([0, 1, 2, 0, 1, 2, 0])
        metrics = MetricCollection(
            [MulticlassAccuracy(num_classes=3, average="micro"), MulticlassConfusionMatrix(num_classes=3)]
        )
        metrics.update(guesses[rank::world_size], truth[rank::world_size])
        [mean.compute().item(), *(value.tolist() for value in metrics.compute().values())]
        """
    )
    expected = [3.5, pytest.approx(5 / 7), [[2, 0, 1], [0, 2, 0], [1, 0, 1]]]
    assert notebook.value("res.values") == [expected, expected]


def test_a_data_loader_with_workers_and_a_sampler_splits_the_data(notebook):
    notebook.ok(
        """
        %%distributed -n 2 --out res
        import os
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DistributedSampler

        class Marked(Line):
            def __getitem__(self, index):
                return *super().__getitem__(index), index, os.getpid()

        torch.manual_seed(rank)
        data, losses, orders, workers = Marked(), [], [], set()
        sampler = DistributedSampler(data, seed=7)
        batches = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
        model = DistributedDataParallel(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            orders.append([])
            for x, y, indices, processes in batches:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                orders[-1] += indices.tolist()
                workers.update(processes.tolist())
        data.seen = orders[0]
        {
            **facts(data, losses, model.module),
            "orders": orders,
            "workers": len(workers),
            "own": os.getpid() in workers,
        }
        """
    )
    values = notebook.value("res.values")
    must_have_trained(values)
    for first, second in zip(values[0]["orders"], values[1]["orders"], strict=True):
        assert sorted(first + second) == list(range(ITEMS))
    assert values[0]["orders"][0] != values[0]["orders"][1]
    assert [(value["workers"], value["own"]) for value in values] == [(2, False)] * 2


def test_torch_compile_takes_a_function_and_a_model_of_the_cell(kernel):
    kernel.ok(
        """
        %%distributed -n 2 --out res
        import inspect
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        graphs = []
        def backend(graph, inputs):
            graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
            return graph.forward

        def curve(x):
            y = x.sin()
            return y + y.cos()

        x = torch.arange(4.0)[:, None] + rank
        same = torch.equal(torch.compile(curve, backend=backend, fullgraph=True)(x), curve(x))

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

            def forward(self, x):
                return self.last(self.first(x).tanh())

        torch.manual_seed(rank)
        model = DistributedDataParallel(Net())
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for step in range(5):
            loss = nn.functional.mse_loss(compiled(x), 2 * x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        {
            "source": inspect.getsource(curve),
            "same": same,
            "graphs": graphs,
            "losses": losses,
            "weights": [weight.tolist() for weight in model.parameters()],
        }
        """
    )
    first, second = kernel.value("res.values")
    for value in (first, second):
        assert value["source"] == "def curve(x):\n    y = x.sin()\n    return y + y.cos()\n"
        assert value["same"]
        assert [len(calls) for calls in value["graphs"]] == [3, 3]  # nothing fell back to Python
        assert value["losses"][-1] < value["losses"][0]
    assert first["weights"] == second["weights"]


def inductor_can_build():
    """Say whether there is a C++ compiler, and Python's own headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(map(shutil.which, ("g++", "clang++")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torch_compile_builds_machine_code_for_a_function_of_the_cell(kernel, tmp_path):
    if not inductor_can_build():
        pytest.skip("torch.compile's own backend needs a C++ compiler and Python.h")
    kernel.ok(
        """
        %%distributed -n 2 --out res
        import torch

        def curve(x):
            y = x.sin()
            return y + y.cos()

        # Its directory of compiled headers would lie in the temporary directory, and stay there.
        compiled = torch.compile(curve, fullgraph=True, options={"cpp_cache_precompile_headers": False})
        x = torch.arange(4.0) + rank
        torch.allclose(compiled(x), curve(x))
        """,
        timeout=250,
    )
    assert kernel.value("res.values") == [True, True]
    assert list((tmp_path / "inductor").rglob("*.so"))
