"""Values of ranks, as a notebook shows them."""

from __future__ import annotations

import re


def test_a_cell_shows_the_summary_and_hands_over_the_tensor(start_kernel):
    kernel = start_kernel(NBLAUNCH_DISPLAY="html")
    ran = kernel.ok(
        """
        %%distributed -n 2 --out res
        import torch
        torch.arange(1_000_000.0).reshape(1000, 1000)
        """
    )
    summary = "tensor(shape=(1000, 1000), dtype=float32, device=cpu, min=0, max=1e+06, mean=5e+05)"
    assert ran.displays[0]["text/plain"] == f"ranks 0-1: {summary}"
    assert summary in ran.displays[0]["text/html"]
    assert kernel.value("(res[1].shape, res[1][-1, -1].item())") == [[1000, 1000], 999_999]


def test_a_data_frame_is_shown_as_its_own_table_and_its_own_text(start_kernel):
    kernel = start_kernel(NBLAUNCH_DISPLAY="html")
    ran = kernel.ok(
        """
        %%distributed -n 2
        import pandas as pd
        pd.DataFrame({"loss": [0.5, 0.25]}, index=["first", "last"])
        """
    )
    html = ran.displays[0]["text/html"]
    assert "<th>loss</th>" in html
    assert "<td>0.25</td>" in html
    assert re.search(r"ranks 0-1: +loss\n +first +0.50\n +last +0.25$", ran.displays[0]["text/plain"])
