"""Samples tokens from logits on the CPU: numpy bindings of `csrc/sampling/sampler.cpp`.

Sampling is by the Gumbel-max trick: the token that maximizes `logit / temperature + noise` has the
softmax's distribution. The noise is a pure function of (seed, position, token), so the rest of the
batch cannot change a token. Min_p, top-k and top-p each keep the best tokens. Among equal logits
the lower token wins. Top-p keeps the fewest tokens that reach p of the probability left before.
"""

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.execution.cpu_executor import BLOCK_TOKENS, ISAS, Isa
from headrace.engine_proc.worker.execution.executor import Floats, Int32s
from headrace.ipc.worker_messages import SAMPLING_CODES
from headrace.native_core import load_core
from headrace.system.machine import usable_cores

Masks = npt.NDArray[np.uint32]

CODES = {"Q": "<u8", "i": "<i4", "f": "<f4"}  # of `struct`, as numpy calls them
ROW = np.dtype([(name, CODES[code]) for name, code in SAMPLING_CODES.items()], align=True)
MAX_THREADS = 8
NO_TOKENS = np.empty(0, np.int32)
NO_BIAS = np.empty(0, np.float32)
NO_MASKS = np.empty((0, 0), np.uint32)
MASK_TOKENS = 32  # of a word of a mask
UPDATE_NUMBERS = 3  # of an update of a history: slot, start, count


class SampleStep(Structure):
    """`SampleStep` of csrc/sampling/sampler.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "maxima", "rows", "bias_tokens", "bias")),
        *((name, c_void_p) for name in ("masks", "mask_rows", "token_ids", "logprobs")),
        *((name, c_int64) for name in ("stride", "mask_words")),
        *((name, c_int32) for name in ("num_rows", "num_bias")),
    )


class Sampler:
    """Samples the rows of one step after another. Not for several threads at once.

    Args:
        threads: of one step, the caller's included. By default, one per core we may use, at most
            8: each holds 40 bytes per token of the vocabulary.
        isa: the instruction set; it changes the speed and no result.

    Raises:
        MemoryError: there is too little, or this processor lacks `isa`.
    """

    def __init__(
        self, vocab_size: int, *, threads: int | None = None, isa: Isa | str = Isa.BEST
    ) -> None:
        self.vocab_size = vocab_size
        self.core = declare(load_core())
        num_threads = threads or min(MAX_THREADS, usable_cores())
        number = ISAS.index(Isa(isa))
        self.state = c_void_p(self.core.headrace_sampler_create(vocab_size, num_threads, number))
        if not self.state:
            raise MemoryError(f"a sampler of {vocab_size} tokens does not fit, or {isa} is lacking")

    def __del__(self) -> None:
        if getattr(self, "state", None):
            self.core.headrace_sampler_destroy(self.state)

    def update_histories(self, updates: Int32s, tokens: Int32s) -> None:
        """Put tokens into slots, for rows to name. Slots come to be as they are named.

        Args:
            updates, tokens: `history_updates` and `history` of `worker_messages.Step`, all of them
                known.

        Raises:
            ValueError: an update leaves a gap in its slot, or there are more tokens or fewer.
        """
        tokens = np.ascontiguousarray(tokens)
        updates = np.ascontiguousarray(updates)
        if len(updates) % UPDATE_NUMBERS:
            raise ValueError(f"{len(updates)} numbers are no updates of histories")
        status: int = self.core.headrace_sampler_update(
            self.state,
            updates.ctypes.data,
            len(updates) // UPDATE_NUMBERS,
            tokens.ctypes.data,
            len(tokens),
        )
        if status == 1:
            raise ValueError("an update of a history leaves a gap, or lacks a slot or tokens")
        if status == 2:
            raise MemoryError(f"{len(tokens)} tokens of histories do not fit")

    def sample(
        self,
        logits: Floats,
        rows: npt.NDArray[np.void],
        bias_tokens: Int32s = NO_TOKENS,
        bias: Floats = NO_BIAS,
        masked_rows: Int32s = NO_TOKENS,
        masks: Masks = NO_MASKS,
        maxima: Floats | None = None,
    ) -> tuple[Int32s, bytes]:
        """Choose a token for each row.

        A row whose logits are all minus infinity gets token 0. Biases and penalties that leave no
        token of a mask do not count in its row. Tokens beyond the vocabulary, in a history or
        among the biases, are passed over.

        Args:
            logits: [rows, vocab_size], not changed.
            rows: [rows] of `ROW`.
            bias_tokens, bias: what the rows point into.
            masked_rows: the rows in which only some tokens may be chosen.
            masks: [masked_rows, words], a bit for each of these tokens, the lowest first. What they
                do not reach, as in models that have more logits than tokens, is not chosen.
            maxima: [rows, blocks], the largest of each 64 logits of a row, if they are known.

        Returns:
            The token of each row, [rows], and `worker_messages.StepResult.logprobs`.

        Raises:
            ValueError: a row points out of range.
        """
        assert logits.shape == (len(rows), self.vocab_size)
        assert logits.dtype == np.float32
        assert rows.dtype == ROW
        assert bias_tokens.shape == bias.shape
        assert len(masked_rows) == len(masks)
        if maxima is not None:
            assert maxima.shape == (len(rows), -(-self.vocab_size // BLOCK_TOKENS))
            assert maxima.dtype == np.float32 and maxima.flags.c_contiguous
        mask_rows = None
        if len(masked_rows):
            assert masks.dtype == np.uint32
            num_missing = -(-self.vocab_size // MASK_TOKENS) - masks.shape[1]
            if num_missing > 0:
                masks = np.pad(masks, ((0, 0), (0, num_missing)))
            assert masks.flags.c_contiguous
            mask_rows = np.full(len(rows), -1, np.int32)
            mask_rows[masked_rows] = np.arange(len(masks))
        if logits.strides[1] != logits.itemsize:
            logits = np.ascontiguousarray(logits)
        arrays = [np.ascontiguousarray(array) for array in (rows, bias_tokens, bias)]
        token_ids = np.empty(len(rows), np.int32)
        num_logprobs = max(0, int(np.add.reduce(rows["num_logprobs"])) + len(rows))  # -1: none
        logprobs = ctypes.create_string_buffer(8 * num_logprobs)
        step = SampleStep(
            logits.ctypes.data,
            None if maxima is None else maxima.ctypes.data,
            *(array.ctypes.data for array in arrays),
            masks.ctypes.data,
            None if mask_rows is None else mask_rows.ctypes.data,
            token_ids.ctypes.data,
            ctypes.addressof(logprobs),
            logits.strides[0] // logits.itemsize,
            masks.shape[1],
            len(rows),
            len(bias),
        )
        status: int = self.core.headrace_sampler_sample(self.state, ctypes.byref(step))
        if status == 1:
            raise ValueError("a row names a target, a history or biases beyond their range")
        if status == 2:
            raise MemoryError(f"a step of {len(rows)} rows does not fit")
        return token_ids, logprobs.raw


def declare(core: ctypes.CDLL) -> ctypes.CDLL:
    """Give the functions of csrc/sampling/sampler.cpp their types."""
    for name, result, arguments in (
        ("create", c_void_p, (c_int32, c_int32, c_int32)),
        ("destroy", None, (c_void_p,)),
        ("sample", c_int32, (c_void_p, POINTER(SampleStep))),
        ("update", c_int32, (c_void_p, c_void_p, c_int32, c_void_p, c_int64)),
    ):
        function = core[f"headrace_sampler_{name}"]
        function.restype = result
        function.argtypes = arguments
        setattr(core, f"headrace_sampler_{name}", function)
    return core
