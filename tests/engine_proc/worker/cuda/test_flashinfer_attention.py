"""Where FlashInfer attends, a decoder says what it says with our own kernel. The library here is
none: it takes what the real one takes, and attends in plain torch."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from random_decoders import NUM_PAGES, SPECS, batch, random_weights
from torch import Tensor

from headrace.engine_proc.worker.cuda import loader
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.flashinfer_attention import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    columns_of,
    is_for,
    why_not,
)
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import E4M3
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec
from headrace.engine_proc.worker.reference.torch_attention import Reach, attend
from headrace.errors import ModelError

TINY = dataclasses.replace(
    SPECS["llama"],
    num_heads=2,
    num_kv_heads=1,
    hidden_size=32,
    intermediate_size=40,
    layers=(LayerSpec(window=7), LayerSpec()),
    attention_softcap=2.0,
)


class Wrapper:
    """A `BatchPrefillWithPagedKVCacheWrapper`, as far as it is asked for anything."""

    num_runs = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")
        assert float_workspace_buffer.numel() == WORKSPACE_BYTES

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        columns = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all((x.device.type, x.dtype, x.ndim) == ("cpu", torch.int32, 1) for x in columns)
        num_sequences = len(paged_kv_last_page_len)
        assert len(qo_indptr) == len(paged_kv_indptr) == num_sequences + 1
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        assert causal
        assert window_left >= -1
        self.columns = [x.tolist() for x in columns]
        self.q_shape = self.columns[0][-1], num_qo_heads, head_dim_qk
        self.page_shape = page_size, num_kv_heads, head_dim_qk
        self.dtypes = q_data_type, kv_data_type
        self.options = {
            "scale": sm_scale,
            "reach": Reach(before=None if window_left < 0 else window_left),
            "softcap": logits_soft_cap,
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert q.shape == self.q_shape
        assert keys.shape[1:] == values.shape[1:] == self.page_shape
        assert (q.dtype, keys.dtype) == self.dtypes
        starts, page_starts, pages, last = self.columns
        out = torch.empty_like(q)
        for sequence, num_last in enumerate(last):
            own = pages[page_starts[sequence] : page_starts[sequence + 1]]
            num_keys = (len(own) - 1) * len(keys[0]) + num_last
            rows = slice(starts[sequence], starts[sequence + 1])
            positions = torch.arange(num_keys - (rows.stop - rows.start), num_keys)
            k, v = (x[own].flatten(0, 1)[:num_keys].float() for x in (keys, values))
            out[rows] = attend(q[rows].float(), k, v, positions, **self.options).to(q.dtype)
        Wrapper.num_runs += 1
        return out


class Library:
    """The module."""

    BatchPrefillWithPagedKVCacheWrapper = Wrapper


class SaidEvent:
    """Says what is done with it."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self) -> None:
        self.said.append("planned")

    def synchronize(self) -> None:
        self.said.append("wait")


def test_prompts_are_attended_to_as_by_our_kernel(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the stand-in is of a CPU")
    ours, theirs = (
        CudaExecutor(
            TINY,
            random_weights(TINY),
            num_pages=NUM_PAGES,
            page_tokens=16,
            device=device,
            dtype=torch.float32,
        )
        for _ in range(2)
    )
    event = SaidEvent()
    theirs.prompts = FlashInferAttention(
        TINY,
        page_tokens=16,
        device=device,
        dtype=torch.float32,
        library=Library,
        make_event=lambda: event,
    )
    Wrapper.num_runs = 0
    for parts in ([(0, 0, 20), (2, 0, 16)], [(2, 16, 17), (0, 20, 21)], [(0, 21, 51), (3, 0, 2)]):
        step = dataclasses.replace(batch(parts), logit_rows=np.array([0, -1], np.int32))
        step.logit_rows[1] = len(step.token_ids) - 1
        np.testing.assert_allclose(theirs.forward(step), ours.forward(step), atol=1e-4)
    assert Wrapper.num_runs == 2 * len(TINY.layers), "single tokens are our kernel's"
    assert event.said == ["wait", "planned"] * 2


def test_pages_are_listed_one_sequence_after_the_other() -> None:
    step = batch([(1, 30, 33), (0, 0, 16)], page_tokens=16)
    columns = columns_of(step, 16)
    assert [column.tolist() for column in columns[:2]] == [[0, 3, 19], [0, 3, 4]]
    assert columns.pages.tolist() == [*step.page_table[1, :3], step.page_table[0, 0]]
    assert columns.last_page_tokens.tolist() == [1, 16]
    assert {column.dtype for column in columns} == {np.dtype(np.int32)}


def test_steps_of_single_tokens_are_for_our_kernel() -> None:
    assert is_for(Sizes(64, 4, 4))
    assert not is_for(Sizes(63, 4, 4))
    assert not is_for(Sizes(4, 4, 4))


BF16 = torch.bfloat16
KNOWN = dataclasses.replace(SPECS["llama"], head_dim=128)
CHUNKED = LayerSpec(window=7, is_chunked=True)


@pytest.mark.parametrize(
    ("spec", "dtype", "kv_dtype", "text"),
    [
        (KNOWN, BF16, BF16, ""),
        (dataclasses.replace(KNOWN, layers=(LayerSpec(window=7),)), BF16, BF16, ""),
        (dataclasses.replace(KNOWN, layers=(CHUNKED,)), BF16, BF16, "in chunks"),
        (dataclasses.replace(KNOWN, attention_sinks=True), BF16, BF16, "attention sinks"),
        (SPECS["llama"], BF16, BF16, "heads have 16 numbers"),
        (KNOWN, torch.float16, torch.float16, ""),
        (KNOWN, torch.float32, torch.float32, "products are in float32"),
        (KNOWN, BF16, E4M3, "keys and values are in 8 bits"),
    ],
)
def test_what_it_cannot_do_is_named(
    spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype, text: str
) -> None:
    reason = why_not(spec, dtype, kv_dtype)
    assert text in reason
    assert bool(text) == bool(reason)


def test_unavailable_flashinfer_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        spec, dtype, kv_dtype = KNOWN, BF16, BF16

    executor: Any = Loaded()
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda _name: None)
    missing = "^--attention-backend flashinfer: the package flashinfer-python is missing; use trit"
    with pytest.raises(ModelError, match=missing):
        loader.flashinfer_for(executor)
    executor.kv_dtype = E4M3
    with pytest.raises(ModelError, match=r"keys and values are in 8 bits; use triton$"):
        loader.flashinfer_for(executor)


def test_flashinfer_itself_agrees(device: torch.device) -> None:
    library = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    if device.type == "cpu":
        pytest.skip("there is no GPU")
    spec = dataclasses.replace(KNOWN, hidden_size=256, num_heads=4, num_kv_heads=2)
    ours, theirs = (
        CudaExecutor(spec, random_weights(spec), num_pages=NUM_PAGES, page_tokens=16, device=device)
        for _ in range(2)
    )
    theirs.prompts = FlashInferAttention(
        spec, page_tokens=16, device=device, dtype=torch.bfloat16, library=library
    )
    for parts in ([(0, 0, 200), (2, 0, 33)], [(0, 200, 290), (1, 0, 17)]):
        step = batch(parts)
        np.testing.assert_allclose(theirs.forward(step), ours.forward(step), atol=0.15)
