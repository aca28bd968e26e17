"""Cells that train DDP and FSDP2 models on a session's ranks, and fail within a step when they are told to.

`STEPS` defines `made(kind)`, `step(model, opt, number)` and `held(model)`. With `failing` set to "forward",
"between" or "backward", odd ranks, or all of them with `alike`, do there what `fail()` does: it raises.
"""

STEPS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def fail(): raise ValueError("a mistake")
def fails(where): return failing == where and (alike or rank % 2)

class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if fails("backward"): fail()
        return grad

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        x = self.second(self.first(x).relu())
        if fails("forward"): fail()
        return self.third(Fail.apply(x))

def made(kind, **options):
    torch.manual_seed(7)
    model = Layers().to(device)
    if kind == "ddp":
        model = DDP(model, bucket_cap_mb=1e-6, **options)
    elif kind == "fsdp":
        options = options or {"mesh": init_device_mesh(device.type, (world_size,))}
        for each in (model.first, model.second, model.third, model):
            fully_shard(each, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)

def step(model, opt, number):
    torch.manual_seed(100 * number + rank)
    opt.zero_grad()
    loss = model(torch.randn(16, 8).to(device)).square().mean()
    if fails("between"): fail()
    loss.backward()
    # A program that runs ahead of its GPU queues the next step behind a collective that may be interrupted.
    if device.type == "cuda": torch.cuda.synchronize()
    opt.step()

def held(model):
    local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    return [each.detach().clone() for each in local]

failing, alike = "", False
"""

# DDP arranges other buckets for it than it begins with: layers are made and used in different orders.
UNORDERED = """
import copy
class Unordered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
    def forward(self, x): return self.c(self.a(self.b(x)))

def gradients(model):
    model.zero_grad()
    model(torch.ones(8, 4) * (rank + 1)).square().mean().backward()
    return [each.grad.tolist() for each in model.parameters()]
"""

BEGUN = """
undisturbed, other = made({0})
model, opt = made({0})
for number in range(6): step(undisturbed, other, number)
for number in range(3): step(model, opt, number)
"""
"""Formatted with the arguments of `made`: one model is trained as far as another one is to come."""

FINISHED = """
failing = ""
for number in range(3, 6): step(model, opt, number)
all(map(torch.equal, held(model), held(undisturbed)))
"""

REFUSED = """
from nblaunch.rank import in_place
connect, in_place._CONNECT_SECONDS = in_place._connect, 2.0
def refuse(*_):
    in_place._connect = connect
    raise RuntimeError("no connection\\nand more")
if rank == 1: in_place._connect = refuse
"""
"""Rank 1 cannot connect the next group, with one error."""
