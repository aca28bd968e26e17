"""A view is pickled with what it shows of its storage, and tensors that share memory still share it."""

from __future__ import annotations

import pickle
from typing import cast

import numpy as np
import pandas as pd
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


def whole(value):
    packed = pickling.dumps(value, {})
    buffers = [memoryview(bytearray(cast("memoryview", each))) for each in packed.buffers]
    return pickling.loads(packed.stream, buffers), packed.size


def again(value):
    """Return what arrives when what has arrived is sent on."""
    return home(sent(value)[0])


EACH_WAY = [sent, home, whole, again]
SIZES = [6, BIG]


@pytest.mark.parametrize("send", [sent, home, again])
def test_arrays_send_what_they_show(send):
    big = np.arange(BIG)
    for view in (
        big[5:9],
        big[-9:-1:2],
        big[7:3:-1],
        big[100:106].reshape(2, 3).T,
        np.broadcast_to(big[7:8], (3, 4)),
    ):
        got, size = send(view)
        assert got.tolist() == view.tolist()
        # What comes back can be written to, so that its elements have memory of their own.
        assert got.strides == view.strides or (not view.flags.writeable and send is not sent)
        assert size < 1000


@pytest.mark.parametrize("send", EACH_WAY)
@pytest.mark.parametrize("size", SIZES)
def test_views_of_an_array_share_its_memory_in_any_order(send, size):
    X = np.arange(float(size))  # noqa: N806 - as in a notebook
    train, test = X[: size // 2], X[size // 2 :]
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        got, bytes_ = send([(X, train, test)[each] for each in order])
        x, left, right = (got[order.index(each)] for each in range(3))
        x -= 1
        assert (left[0], right[-1]) == (-1, size - 2)
        assert bytes_ < 8 * size + 900
    left, right = send((train, X[1:3]))[0]
    right[:] = 7
    assert left[1:3].tolist() == [7, 7]


@pytest.mark.parametrize("send", EACH_WAY)
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_over_an_array_shares_its_memory_in_any_order(send, size):
    a = np.arange(float(size))
    t, part = torch.from_numpy(a), torch.from_numpy(a[size // 2 :])
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        got, bytes_ = send([(a, t, part)[each] for each in order])
        array, tensor, rest = (got[order.index(each)] for each in range(3))
        array[0], array[-1] = 9, 8
        assert (tensor[0], tensor[-1], rest[-1]) == (9, 8, 8)
        assert bytes_ < 8 * size + 2500
    (array, rest), _ = send((a[1:2], t[1:3]))
    array[0] = 5
    assert rest[0] == 5


@pytest.mark.parametrize("send", EACH_WAY)
@pytest.mark.parametrize("size", SIZES)
def test_an_array_over_a_tensor_shares_its_memory_in_any_order(send, size):
    t = torch.arange(float(size))
    for pair in ((t, t.numpy()), (t[1:3], t.numpy()[1:3])):
        for first in (0, 1):
            got, _ = send((pair[first], pair[1 - first]))
            got[first][0] = 77
            assert got[1 - first][0] == got[first][0] == 77


@pytest.mark.parametrize("send", [sent, home])
def test_an_array_and_a_tensor_over_it_take_along_what_they_show_together(send):
    a = np.arange(BIG)
    (left, right), size = send((a[1000:1010], torch.from_numpy(a)[1005:1020]))
    left[5] = -1
    assert right[0] == -1
    assert size < 2000


@pytest.mark.parametrize("send", EACH_WAY)
def test_arrays_of_one_buffer_of_bytes_share_it(send):
    buffer = bytearray(16)
    first, second = send((np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, np.int16, offset=4)))[0]
    second[0] = 3
    assert first[4] == 3


@pytest.mark.parametrize("send", EACH_WAY)
def test_views_of_an_array_of_objects_share_it(send):
    objects = np.array([[1], "two", None], dtype=object)
    for pair in ((objects, objects[1:]), (objects[1:], objects)):
        long, short = sorted(send(pair)[0], key=len, reverse=True)
        long[1] = "x"
        assert short.tolist() == ["x", None]


def test_an_array_that_shows_more_than_there_is_arrives_as_what_it_shows():
    numbers = np.arange(4.0)
    beyond = np.lib.stride_tricks.as_strided(numbers[1:], (2,), (16,))
    assert sent(beyond)[0].tolist() == beyond.tolist()
    assert sent(np.arange(3)[:0])[0].tolist() == []


def test_a_slice_of_a_data_frame_takes_along_what_it_shows():
    frame = pd.DataFrame({"a": np.arange(BIG), "b": np.arange(BIG) / 2})
    for send in (sent, home, whole):
        got, size = send(frame[5:9])
        assert got.equals(frame[5:9])
        assert size < 3000
    assert whole(frame)[1] < 16 * BIG + 3000


def test_an_array_of_a_file_that_is_gone_arrives_as_an_array(tmp_path):
    file = tmp_path / "numbers"
    mapped = np.memmap(file, float, "w+", shape=(5,))
    mapped[:] = 3
    assert isinstance(sent(mapped)[0], np.memmap)
    assert sent(mapped)[0].filename == file
    file.unlink()
    assert sent(mapped)[0].tolist() == [3] * 5


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
