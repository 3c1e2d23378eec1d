"""Samples tokens and log probabilities from logits on a device; the results stay there."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.grammar_mask import apply_mask
from headrace.engine_proc.worker.cuda.kernels.logit_bias import add_biases
from headrace.engine_proc.worker.cuda.kernels.logprobs import report
from headrace.engine_proc.worker.cuda.kernels.penalties import Penalties, penalize
from headrace.engine_proc.worker.cuda.row_draws import PLACES, RowDraws
from headrace.engine_proc.worker.execution.cpu_sampler import ROW
from headrace.engine_proc.worker.execution.executor import Int32s
from headrace.engine_proc.worker.execution.runner import MaskSource
from headrace.ipc.worker_messages import Step

Rows = npt.NDArray[np.void]


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

    def __init__(self, device: torch.device, draws: RowDraws) -> None:
        self._device = device
        self._draws = draws

    def send_rows(self, step: Step) -> None:
        """Send a step's rows before its forward pass, so that no copy comes before the draw."""
        if step.rows:
            self._draws.send(np.frombuffer(step.rows, np.int32))

    def sample(self, logits: Tensor, step: Step, masks_of: MaskSource) -> Drawn:
        """Choose a token for each row that was sent; see `Sampler.sample`.

        The masks are asked for when all that needs none has been launched.

        Args:
            logits: [rows, vocab_size], fp32; changed.
        """
        rows: Rows = np.frombuffer(step.rows, ROW)
        if len(rows) == 0:
            return Drawn(logits.new_empty(0, dtype=torch.int32))
        masked_rows = np.frombuffer(step.masked_rows, np.int32)
        adjusted = adjusted_rows(rows, masked_rows)
        untouched = Untouched(logits, self.send(adjusted)) if len(adjusted) else None
        reported = np.flatnonzero(rows["num_logprobs"] >= 0)
        models_own = logits[self.send(reported)] if len(reported) else None
        columns = self._draws.columns(len(rows))
        history = self.history_of(step) if step.history else None
        self.adjust(logits, step, rows, columns, history)
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

    def history_of(self, step: Step) -> Tensor:
        """Return a step's history, with the tokens that the step before has drawn, int32."""
        tokens = np.frombuffer(step.history, np.int32)
        history = self.send(tokens)
        if not (tokens < 0).any():
            return history
        return torch.where(history < 0, self._draws.drawn[(-1 - history).clamp(min=0)], history)

    def adjust(
        self, logits: Tensor, step: Step, rows: Rows, columns: Tensor, history: Tensor | None
    ) -> None:
        """Add biases, then penalize, in place."""
        if step.bias:
            add_biases(
                logits,
                columns[:, PLACES["bias_start"]],
                columns[:, PLACES["num_bias"]],
                self.send(np.frombuffer(step.bias_tokens, np.int32)),
                self.send(np.frombuffer(step.bias, np.float32)),
            )
        if history is not None:
            have_history = np.flatnonzero(rows["num_history"] > 0)
            penalized = self.send(have_history)
            own = columns[penalized].T.contiguous()
            real = own.view(torch.float32)
            penalties = Penalties(
                rows=penalized,
                starts=own[PLACES["history_start"]],
                num_prompt=own[PLACES["num_prompt"]],
                num_history=own[PLACES["num_history"]],
                presence=real[PLACES["presence_penalty"]],
                frequency=real[PLACES["frequency_penalty"]],
                repetition=real[PLACES["repetition_penalty"]],
            )
            most = int(rows["num_history"].max())
            penalize(logits, penalties, history, most)

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
