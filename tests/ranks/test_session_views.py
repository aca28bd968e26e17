"""NumPy's views, torch's tensors over NumPy's memory and arrays of files are on the ranks what they are."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def session_kernel(module_kernel):
    """Start a session in the kernel that the tests here share."""
    module_kernel.ok("%distributed start -n 2")
    module_kernel.ok("%%distributed\nbefore = {*globals(), 'before'}")
    yield module_kernel
    module_kernel.ok("%distributed stop")


@pytest.fixture
def kernel(session_kernel):
    """Give the kernel with its session, and NumPy."""
    session_kernel.ok("import numpy as np, torch")
    yield session_kernel
    session_kernel.forget()
    session_kernel.ok("%%distributed\nfor name in {*globals()} - before: del globals()[name]")


def ranks(kernel, cell, line=""):
    """Return what both ranks have made of a cell, and its notices."""
    kernel.ok(f"%%distributed --out res {line}\n{cell}")
    first, *others = kernel.value("res.values")
    assert all(other == first for other in others)
    return first, kernel.value("[str(each) for each in res.warnings]")


def test_a_view_shares_memory_with_what_the_ranks_have_already(kernel):
    kernel.ok("X = np.arange(6.) + 10; train, test = X[:4], X[4:]")
    assert ranks(kernel, "X -= X.mean(); X.tolist()") == ([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], [])
    assert ranks(kernel, "train.tolist()") == ([-2.5, -1.5, -0.5, 0.5], [])
    assert ranks(kernel, "test[:] = 0; X[::-1].tolist()") == ([0, 0, 0.5, -0.5, -1.5, -2.5], [])


def test_a_view_that_came_before_its_array_shares_memory_with_it(kernel):
    kernel.ok("X = np.zeros(5000); head, tail = X[:2], X[-2:]")
    assert ranks(kernel, "head += 1; head.sum()")[0] == 2
    kernel.ok("import gc; gc.collect()")
    assert ranks(kernel, "X.sum()") == (2, [])
    assert ranks(kernel, "del X; tail += 1; tail.sum()")[0] == 2
    assert ranks(kernel, "(X.sum(), head.sum(), tail.sum())")[0] == [4, 2, 2]


@pytest.mark.parametrize("size", [10, pytest.param(10_000, marks=pytest.mark.full)])
def test_an_object_and_its_parts_share_memory_on_fresh_ranks_and_in_the_notebook(kernel, size):
    kernel.ok(f"""
        class Buffer:
            def __init__(self):
                self.data = np.zeros({size}); self.head = self.data[:3]
                self.tensor = torch.from_numpy(self.data)
                self.scores = torch.zeros({size}); self.array = self.scores.numpy()
            def fill(self):
                self.head[:] = 1; self.tensor[0] = 5; self.array[1] = 7
                return self.data.sum(), self.tensor.sum().item(), self.scores.sum().item()
        buffer = Buffer()
    """)
    for line in ("--fresh -n 1", ""):
        kernel.ok(f"%%distributed --out res {line}\n[float(each) for each in buffer.fill()], buffer")
        numbers, _ = kernel.ok("res[0][0]"), kernel.ok("back = res[0][1]")
        assert numbers.result == "[7.0, 7.0, 7.0]"
        assert kernel.value("[float(each) for each in back.fill()]") == [7, 7, 7]
        assert (
            kernel.ok("back.data[2] = 3; back.head[2] + back.tensor[2]").result
            == "tensor(6., dtype=torch.float64)"
        )


@pytest.mark.parametrize("numpy_first", [True, pytest.param(False, marks=pytest.mark.full)])
def test_tensors_over_an_array_share_it_from_cell_to_cell(kernel, numpy_first):
    kernel.ok("a = np.zeros(8); t, part = torch.from_numpy(a), torch.from_numpy(a[4:])")
    kernel.ok("u = torch.zeros(8); b = u.numpy()")
    first, second = ("a, b", "t, u") if numpy_first else ("t, u", "a, b")
    assert ranks(kernel, f"for each in ({first}): each += 1")[1] == []
    assert ranks(kernel, f"[float(each.sum()) for each in ({second}, part)]") == ([8, 8, 4], [])
    assert ranks(kernel, "t[0] = 5; u[0] = 6; part[0] = 7; a.tolist(), b[0].item()")[0] == [
        [5, 1, 1, 1, 7, 1, 1, 1],
        6,
    ]
    kernel.ok("a[0] = 2; t[4] = 3")
    kernel.ok("%distributed push a u")
    assert ranks(kernel, "t[0].item(), part[0].item(), b[0].item()")[0] == [2, 3, 0]


def test_a_change_in_place_is_noticed_for_what_a_view_shows(kernel):
    kernel.ok("X = np.zeros(6); train, test = X[:4], X[4:]")
    assert ranks(kernel, "(train.sum(), test.sum())")[1] == []
    kernel.ok("X[0] = 1")
    assert ranks(kernel, "test.sum()")[1] == []
    for name in ("train", "X"):
        (notice,) = ranks(kernel, f"{name}.sum()")[1]
        assert re.match(rf"{name} was changed in the notebook after it was sent", notice)
    kernel.ok("%distributed push X")
    assert ranks(kernel, "(X.sum(), train.sum())")[0] == [1, 1]
    assert ranks(kernel, "(train.sum(), test.sum(), X.sum())")[1] == []
    kernel.ok("X[1] = 1\nlate = X[:2]")
    kernel.ok("%distributed push late")
    assert ranks(kernel, "(late.sum(), X.sum(), train.sum())") == ([2, 2, 2], [])
    kernel.ok("X[2] = 1\nlater = X[2:]")
    (notice,) = ranks(kernel, "later.sum()")[1]
    assert notice.startswith("later was changed in the notebook after it was sent")


@pytest.mark.parametrize("line", ["", pytest.param("--fresh -n 1", marks=pytest.mark.full)])
def test_an_array_of_a_file_is_that_file_on_the_ranks(kernel, tmp_path, line):
    kernel.ok(f"""
        path = {str(tmp_path / "numbers.bin")!r}
        np.arange(2000.).tofile(path)
        mm = np.memmap(path, float, "r+", offset=80, shape=(30, 10), order="F")
        row, plain, private = mm[1], np.asarray(mm)[:, 1], np.memmap(path, float, "c")
        private[3] = -3
    """)
    cell = """
        facts = [type(mm).__name__, str(mm.filename) == path, mm.offset, mm.mode, mm.shape]
        mm[0, 0] = 99; row[0] = 98; plain[0] = 97; mm.flush(); row.flush()
        facts, str(row.filename) == path, mm[:2, :2].tolist(), [private.mode, private[3], private[4]]
    """
    facts = [["memmap", True, 80, "r+", [30, 10]], True, [[99, 97], [98, 41]], ["c", -3, 4]]
    assert ranks(kernel, cell, line) == (facts, [])
    assert kernel.value("[*np.fromfile(path)[[3, 10, 11, 40]]]") == [3, 99, 98, 97]
    assert kernel.value("[mm[0, 0], row[0], plain[0]]") == [99, 98, 97]
    kernel.ok("mm[0, 0] = 5")
    assert ranks(kernel, "float(mm[0, 0])", line) == (5, [])
    kernel.ok("%%distributed --out res\nmm")
    assert kernel.value("[str(res[1].filename) == path, res[1][0, 0]]") == [True, 5]


def test_arrays_of_any_class_and_form_arrive_as_they_are(kernel):
    kernel.ok("""
        class Signal(np.ndarray):
            def __new__(cls, data, rate):
                self = np.asarray(data).view(cls); self.rate = rate
                return self
            def __array_finalize__(self, obj):
                self.rate = getattr(obj, "rate", 1)
        base = np.arange(12.)
        masked = np.ma.array(base[:6], mask=[0, 1, 0, 0, 1, 0], fill_value=-1.0, hard_mask=True)
        record = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", int), ("b", float)])
        readonly = base[:3].copy(); readonly.flags.writeable = False
        every = [
            Signal(base, 44100)[2:5], Signal(base.copy(), 8000), np.matrix(base.reshape(3, 4)), masked,
            record, readonly, np.broadcast_to(base[:3], (4, 3)), base[::-2], base.reshape(3, 4).T, base[3:3],
            base[3:4].reshape(()), np.arange(3, dtype=">i4")[1:], np.array([{}, None, "x"], object)[::2],
            np.asfortranarray(base.reshape(3, 4)), np.frombuffer(bytearray(b"abcd"), np.uint8)[1:],
            np.frombuffer(b"abcd", np.uint8), record["b"], np.array(["2020", "2021"], "M8[s]")[1:],
            np.lib.stride_tricks.sliding_window_view(base, 5),
        ]
        def facts(arrays):
            return [
                [type(each).__name__, each.dtype.str, each.shape, each.strides, repr(each),
                 each.flags.writeable, getattr(each, "rate", 0)]
                for each in arrays
            ]
        def shown(arrays):
            return [[each[0], *each[1:3], each[4], each[6]] for each in facts(arrays)]
    """)
    for line in ("--fresh -n 1", ""):
        kernel.ok(f"%%distributed --out res {line}\nfacts(every), every, masked.hardmask, every[3] is masked")
        assert kernel.value("res[0][0] == facts(every)") is True
        # Arrays that come back can be written to.
        assert kernel.value("shown(res[0][1]) == shown(every)") is True
        assert kernel.value("all(each.flags.writeable for each in res[0][1])") is True
        assert kernel.value("res[0][2:]") == [True, True]


def test_a_tensor_of_inference_mode_is_one_on_the_ranks_and_back_here(kernel):
    kernel.ok("with torch.inference_mode(): scores = torch.arange(3.); layer = torch.nn.Linear(2, 2)")
    for line in ("--fresh -n 1", ""):
        kernel.ok(
            f"%%distributed --out res {line}\nscores.is_inference(), layer.weight.is_inference(), scores"
        )
        assert kernel.value("[*res[0][:2], res[0][2].is_inference(), res[0][2].tolist()]") == [
            True,
            True,
            True,
            [0, 1, 2],
        ]


def test_objects_of_pandas_that_share_memory_here_do_not_change_each_other_on_the_ranks(kernel):
    kernel.ok("""
        import pandas as pd
        df = pd.DataFrame({"a": np.arange(1000.), "b": np.arange(1000)})
        head, column, same = df[:3], df["a"], df.copy(deep=False)
    """)
    cell = """
        column += 1; same.loc[0, "a"] = -1; df.loc[1, "b"] = 7
        found = df["a"][0], head["a"][0], column[0], same["a"][0], df["b"][1], same["b"][1]
        [float(each) for each in found]
    """
    for line in ("--fresh -n 1", ""):
        assert ranks(kernel, cell, line) == ([0, 0, 1, -1, 7, 1], [])


def test_a_session_of_a_script_shares_as_a_notebook_does(place):
    import numpy as np
    import torch

    X = np.arange(6.0)  # noqa: N806 - as in a notebook
    variables = {"X": X, "train": X[:4], "t": torch.from_numpy(X)}
    with place(2) as session:
        session.cell("X -= 1", namespace=variables)
        assert session.cell("train.tolist(), t.sum().item()", namespace=variables)[0] == ([-1, 0, 1, 2], 9)
        assert session.run(lambda a, b: (a.__iadd__(1).sum(), b.sum()), (X, variables["train"]))[1] == (15, 6)
        session.push({"t": variables["t"]})
        assert session.pull("X")["X"][0].tolist() == X.tolist()
