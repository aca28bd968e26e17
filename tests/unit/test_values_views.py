"""A view is pickled with what it shows of its storage, and tensors that share memory still share it."""

from __future__ import annotations

import pickle
from typing import cast

import numpy as np
import pytest
import torch

from nblaunch.capture import pickling, tensors

BIG = 1_000_000


def sent(value, **options):
    """Return what arrives, and how many bytes travel."""
    packed = pickling.dumps(value, trim=True, **options)
    joined = b"".join(bytes(cast("memoryview", part)) for part in packed.parts)
    parts, start = [], 0
    for part in packed.parts:
        parts.append(memoryview(bytearray(joined[start : start + part.nbytes])))
        start += part.nbytes
    return pickling.loads(parts[0], parts[1:]), packed.size


def home(value):
    packed = pickling.dumps_home(value)
    return pickling.loads(
        packed.stream, [memoryview(bytearray(cast("memoryview", each))) for each in packed.buffers]
    ), packed.size


def in_memory(tensor):
    """Return the first byte of a tensor's storage and of the tensor itself."""
    return tensor.untyped_storage().data_ptr(), tensor.data_ptr()


@pytest.mark.parametrize("send", [sent, home])
def test_a_view_takes_along_what_it_shows(send):
    big = torch.arange(BIG)
    for view in (big[:3], big[500_000:500_010], big[-1:], big[10:20].view(2, 5).t()):
        got, size = send(view)
        assert torch.equal(got, view)
        assert got.stride() == view.stride()
        assert size < 2000


def test_without_being_asked_all_of_the_storage_travels():
    assert pickling.dumps(torch.arange(BIG)[:3]).size > 8 * BIG


def test_views_share_their_memory_on_the_other_side():
    big = torch.arange(BIG)
    (left, right, again, stepped), size = sent(
        (big[1000:1100], big[1050:1200], big[1000:1100], big[1000:1200:7])
    )
    assert size < 200 * 8 + 3000
    left[50] = -1
    assert right[0] == -1
    assert again[50] == -1
    right[6] = -2
    assert stepped[8] == -2


def test_a_whole_tensor_beside_its_view_travels_once():
    big = torch.arange(BIG)
    (whole, view), size = sent((big, big[5:9]))
    assert size < 8 * BIG + 2000
    view += 7
    assert whole[5:9].tolist() == [12, 13, 14, 15]


def test_views_of_different_types_share_one_storage():
    numbers = torch.zeros(BIG, dtype=torch.complex64)
    bytes_ = numbers.view(torch.uint8)[1001:1003]
    (real, imaginary, raw), size = sent((numbers[200:201].real, numbers[200:202].imag, bytes_))
    assert size < 2500
    real += 2
    imaginary += 3
    assert in_memory(real)[0] == in_memory(imaginary)[0] == in_memory(raw)[0]
    assert in_memory(imaginary)[1] - in_memory(real)[1] == 4
    assert in_memory(real)[1] - in_memory(raw)[1] == 1600 - 1001
    assert torch.equal(raw, bytes_)


@pytest.mark.parametrize(
    "make",
    [
        lambda big: big[7].expand(3, 100),
        lambda big: big[10:10],
        lambda big: big[-1:][:0],
        lambda big: big[5],
        lambda big: big[3:9].to(torch.complex64).conj(),
        lambda big: torch.view_as_complex(big[4:8].view(2, 2)).conj(),
        lambda big: torch._neg_view(big[4:8]),
        lambda big: torch.nn.Parameter(big[3:9]),
        lambda big: big[3:9].requires_grad_(),
        lambda big: big.view(torch.float8_e5m2)[100:104],
        lambda big: big.view(torch.uint16)[101:104],
        lambda big: big[:12].view(3, 4).to_sparse(),
        lambda big: big[:12].view(3, 4).to_sparse_csr(),
        lambda big: torch.quantize_per_tensor(big, 0.1, 0, torch.qint8)[5:9],
        lambda big: torch.nested.nested_tensor([big[:3], big[5:9]]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # nested, sparse and quantized tensors say that they are not finished
def test_a_view_of_any_kind_arrives_as_it_was(make):
    big = torch.arange(BIG, dtype=torch.float32)
    view = make(big)
    got, size = sent(view)
    assert type(got) is type(view)
    assert got.requires_grad is view.requires_grad
    assert (got.is_conj(), got.is_neg()) == (view.is_conj(), view.is_neg())
    assert got.layout is view.layout
    if not view.is_quantized and not view.is_sparse:
        assert size < 3000
    if view.is_nested:
        got, view = got.to_padded_tensor(0), view.to_padded_tensor(0)
    if view.is_quantized:
        got, view = got.int_repr(), view.int_repr()
    if view.layout is torch.strided:
        assert got.stride() == view.stride()
        assert got.tolist() == view.tolist() if view.element_size() > 1 else True
    assert str(got) == str(view)


class Named(torch.Tensor):
    """A tensor of a class of its own."""

    label: str


def test_a_subclass_and_attributes_arrive():
    named: Named = torch.arange(BIG)[5:9].as_subclass(Named)
    vars(named)["label"] = "mine"
    got, size = sent(named)
    assert type(got) is Named
    assert got.label == "mine"
    assert got.tolist() == [5, 6, 7, 8]
    assert size < 2000
    new = torch.arange(BIG, dtype=torch.int32).to(torch.uint16)[5:9]
    vars(new)["label"] = "too"
    assert vars(sent(new)[0])["label"] == "too"


def test_a_bare_storage_travels_whole():
    big = torch.arange(BIG)
    for storage in (big.untyped_storage(), big._typed_storage()):
        (view, whole), size = sent((big[5:9], storage))
        assert size > 8 * BIG
        assert whole.nbytes() == 8 * BIG
        assert view.untyped_storage().data_ptr() == whole.data_ptr()
        assert view.tolist() == [5, 6, 7, 8]


def test_a_module_whose_parameters_are_views_of_one_buffer_keeps_them_so():
    flat = torch.arange(BIG, dtype=torch.float32)
    module = torch.nn.Module()
    module.first, module.second = torch.nn.Parameter(flat[100:200]), torch.nn.Parameter(flat[200:400])
    got, size = sent(module)
    assert size < 300 * 4 + 4000
    assert in_memory(got.second)[1] - in_memory(got.first)[1] == 400
    assert in_memory(got.second)[0] == in_memory(got.first)[0]


def test_a_storage_smaller_than_its_tensor_travels_as_it_is():
    tensor = torch.arange(BIG)
    tensor.untyped_storage().resize_(80_000)
    packed = pickling.dumps(tensor, trim=True)
    assert packed.size < 90_000


def test_arrays_send_what_they_show():
    big = np.arange(BIG)
    got, size = sent(big[5:9])
    assert got.tolist() == [5, 6, 7, 8]
    assert size < 1000


class Leaves:
    """Ends whoever loads it."""

    def __reduce__(self):
        import sys

        return sys.exit, (9,)


def test_an_object_that_exits_while_it_is_loaded_is_one_that_cannot_be_loaded():
    with pytest.raises(pickle.UnpicklingError, match=r"SystemExit\(9\)"):
        pickling.loads(pickling.dumps_plain(Leaves()))


# --- what a push fills ------------------------------------------------------------------------------


def a_graph_that_saved(tensor):
    return (tensor.requires_grad_() ** 2).sum()


def test_a_tensor_that_nothing_else_leads_to_takes_the_pushed_memory():
    target, data = torch.zeros(4), torch.ones(4)
    kept, version = [target], target._version
    tensors.copy_content(target, data)
    assert target.tolist() == [1.0] * 4
    assert kept[0].data_ptr() == data.data_ptr()
    assert target._version > version


@pytest.mark.parametrize(
    "other",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        torch.utils.dlpack.to_dlpack,
        a_graph_that_saved,
    ],
    ids=["view", "detached", "numpy", "storage", "dlpack", "graph"],
)
def test_a_tensor_whose_memory_others_use_is_filled_where_it_is(other):
    target = torch.zeros(4)
    memory, held = target.data_ptr(), other(target)
    tensors.copy_content(target, torch.ones(4))
    assert target.tolist() == [1.0] * 4
    assert target.data_ptr() == memory
    del held


def test_a_tensor_of_other_strides_is_filled_where_it_is():
    target = torch.zeros(2, 3).t()
    tensors.copy_content(target, torch.ones(3, 2))
    assert target.stride() == (1, 3)
    assert target.sum() == 6


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_copy_by_value_keeps_what_the_tensor_requires(requires_grad):
    tensor = torch.arange(5000.0, requires_grad=requires_grad)
    rebuild, arguments, *_ = tensors.reduce_by_value(tensor)
    copied = rebuild(*arguments)
    assert copied.requires_grad is requires_grad
    assert torch.equal(copied, tensor)
