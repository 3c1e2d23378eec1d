"""Samples tokens and log probabilities from logits on a device; the results stay there."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.host_to_device import sent
from headrace.engine_proc.worker.cuda.kernels.grammar_mask import apply_mask
from headrace.engine_proc.worker.cuda.kernels.logit_bias import add_biases
from headrace.engine_proc.worker.cuda.kernels.logprobs import report
from headrace.engine_proc.worker.cuda.kernels.penalties import Penalties, penalize
from headrace.engine_proc.worker.cuda.row_draws import PLACES, RowDraws
from headrace.engine_proc.worker.execution.cpu_sampler import ROW, UPDATE_NUMBERS
from headrace.engine_proc.worker.execution.executor import Int32s
from headrace.engine_proc.worker.execution.runner import MaskSource, optional
from headrace.ipc.worker_messages import Step

Rows = npt.NDArray[np.void]

PIECE_TOKENS = 1 << 16  # sent at once: whole histories of many sequences may come in one step
MOST_INT32 = (1 << 31) - 1


class DeviceHistories:
    """What penalties look at: the tokens of sequences, each in a slot, from step to step.

    All slots are there from the start, as long as a sequence can be, so the memory plan counts
    them.
    """

    def __init__(self, num_slots: int, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        size = num_slots * num_tokens
        self._dtype = torch.int32 if size <= MOST_INT32 else torch.int64
        self.tokens = torch.empty(size, dtype=torch.int32, device=device)

    def starts(self, slots: Tensor) -> Tensor:
        """Return where the tokens of slots begin."""
        return slots.to(self._dtype) * self._num_tokens

    def update(self, step: Step, drawn: Tensor) -> None:
        """Put the new tokens of a step into their slots.

        Args:
            drawn: by the step before, [rows], int32; this step has not drawn yet.
        """
        updates = optional(step.history_updates)
        if updates is None:
            return
        slots, starts, counts = updates.reshape(-1, UPDATE_NUMBERS).astype(np.int64).T
        assert (starts + counts <= self._num_tokens).all(), "a history is longer than its slot"
        first_places = slots * self._num_tokens + starts - (counts.cumsum() - counts)
        tokens = np.frombuffer(step.history, np.int32)
        places = np.repeat(first_places, counts) + np.arange(len(tokens))
        for first in range(0, len(tokens), PIECE_TOKENS):
            part = slice(first, first + PIECE_TOKENS)
            pair = torch.from_numpy(np.stack([places[part], tokens[part]]))
            where, new = sent(pair, self.tokens.device)
            if (tokens[part] < 0).any():
                new = torch.where(new < 0, drawn[(-1 - new).clamp(min=0)].long(), new)
            self.tokens[where] = new.int()


@dataclass(frozen=True)
class Drawn:
    """The sampled tokens and log probabilities of a step, on the device."""

    tokens: Tensor  # [rows], int32
    reports: Tensor | None = None  # of `report`, of the rows that want log probabilities;
    num_tops: tuple[int, ...] = ()  # of each of these, how many likeliest tokens it needs


class CudaSampler:
    """Draws the tokens of one step after another.

    Args:
        device: "cpu" where kernels are interpreted.
    """

    def __init__(self, device: torch.device, draws: RowDraws, histories: DeviceHistories) -> None:
        self._device = device
        self._draws = draws
        self._histories = histories

    def send_rows(self, step: Step) -> None:
        """Send a step's rows before its forward pass, so that no copy comes before the draw.

        So are what is new of its histories, and what the step before has drawn of them.
        """
        if step.rows:
            self._draws.send(np.frombuffer(step.rows, np.int32))
            self._histories.update(step, self._draws.drawn)

    def sample(self, logits: Tensor, step: Step, masks_of: MaskSource) -> Drawn:
        """Choose a token for each row that was sent; see `Sampler.sample`.

        The masks are asked for when all that needs none has been launched.

        Args:
            logits: [rows, vocab_size], fp32; changed.
        """
        rows: Rows = np.frombuffer(step.rows, ROW)
        if len(rows) == 0:
            return Drawn(logits.new_empty(0, dtype=torch.int32))
        assert self._draws.num_sent == len(rows), "rows were not sent"
        masked_rows = np.frombuffer(step.masked_rows, np.int32)
        adjusted = adjusted_rows(rows, masked_rows)
        untouched = Untouched(logits, self.send(adjusted)) if len(adjusted) else None
        reported = np.flatnonzero(rows["num_logprobs"] >= 0)
        models_own = logits[self.send(reported)] if len(reported) else None
        columns = self._draws.columns(len(rows))
        self.adjust(logits, step, rows, columns)
        if len(masked_rows):
            masks = self.send(masks_of(len(masked_rows)).view(np.int32))
            masked = self.send(masked_rows)
            apply_mask(logits, masked, masks)
            if untouched is not None:
                untouched.replace_empty(logits, masked, masks)
        tokens = self._draws.draw(logits)
        if (rows["target"] >= 0).any():
            targets = columns[:, PLACES["target"]]
            tokens.copy_(torch.where(targets >= 0, targets, tokens))
        if models_own is None:
            return Drawn(tokens)
        num_tops = rows["num_logprobs"][reported]
        most = int(num_tops.max())
        reports = report(models_own, tokens[self.send(reported)], self.send(num_tops), most)
        return Drawn(tokens, reports, tuple(num_tops.tolist()))

    def adjust(self, logits: Tensor, step: Step, rows: Rows, columns: Tensor) -> None:
        """Add biases, then penalize, in place."""
        if step.bias:
            add_biases(
                logits,
                columns[:, PLACES["bias_start"]],
                columns[:, PLACES["num_bias"]],
                self.send(np.frombuffer(step.bias_tokens, np.int32)),
                self.send(np.frombuffer(step.bias, np.float32)),
            )
        have_history = np.flatnonzero(rows["num_history"] > 0)
        if len(have_history):
            penalized = self.send(have_history)
            own = columns[penalized].T.contiguous()
            real = own.view(torch.float32)
            penalties = Penalties(
                rows=penalized,
                starts=self._histories.starts(own[PLACES["history_slot"]]),
                num_prompt=own[PLACES["num_prompt"]],
                num_history=own[PLACES["num_history"]],
                presence=real[PLACES["presence_penalty"]],
                frequency=real[PLACES["frequency_penalty"]],
                repetition=real[PLACES["repetition_penalty"]],
            )
            most = int(rows["num_history"].max())
            penalize(logits, penalties, self._histories.tokens, most)

    def send(self, numbers: npt.NDArray[np.generic]) -> Tensor:
        """Send numbers to the device, and wait for nothing; ours may be changed at once."""
        copy = torch.from_numpy(numbers.copy())
        if self._device.type == "cuda":
            copy = copy.pin_memory()
        return copy.to(self._device, non_blocking=True)


class Untouched:
    """Rows as the model has left them, whose masks may allow nothing that biases and penalties
    leave: there the mask alone counts.

    Args:
        rows: [some], int32, of the logits; each of them gets a mask.
    """

    def __init__(self, logits: Tensor, rows: Tensor) -> None:
        self._rows = rows
        self._logits = logits[rows]

    def replace_empty(self, logits: Tensor, masked_rows: Tensor, masks: Tensor) -> None:
        """Mask rows that have nothing left by their masks alone, in place. See `apply_mask`."""
        of_mask = (masked_rows == self._rows[:, None]).int().argmax(1)
        own = torch.arange(len(self._rows), dtype=torch.int32, device=logits.device)
        apply_mask(self._logits, own, masks[of_mask])
        adjusted = logits[self._rows]
        is_empty = ~(adjusted > -torch.inf).any(1, keepdim=True)
        logits[self._rows] = torch.where(is_empty, self._logits, adjusted)


def adjusted_rows(rows: Rows, masked_rows: Int32s) -> Int32s:
    """Return the masked rows that have biases or penalties, too, and draw a token."""
    is_adjusted = (rows["num_bias"] > 0) | (rows["num_history"] > 0)
    return masked_rows[is_adjusted[masked_rows] & (rows["target"][masked_rows] < 0)]
