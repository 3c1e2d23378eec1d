"""From logits on a device to tokens: on the device where a row asks for no more than a draw.

Rows that ask for penalties or log probabilities, or whose token is known, go to the C++ sampler;
of the others nothing but tokens leaves the device.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.bias import add_biases
from headrace.engine_proc.worker.cuda.row_draws import PLACES, RowDraws
from headrace.engine_proc.worker.cuda.token_mask import apply_mask
from headrace.engine_proc.worker.executor import Floats, Int32s
from headrace.engine_proc.worker.runner import MaskSource
from headrace.engine_proc.worker.sampler import NO_MASKS, ROW, Masks, Sampler
from headrace.messages import Step

Rows = npt.NDArray[np.void]


class DeviceSampler:
    """Draws the tokens of one step after another.

    Args:
        device: "cpu" where kernels are interpreted.
        on_host: for what the device does not do.
    """

    def __init__(self, device: torch.device, on_host: Sampler, draws: RowDraws) -> None:
        self._device = device
        self._on_host = on_host
        self._draws = draws

    def sample(self, logits: Tensor, step: Step, masks_of: MaskSource) -> tuple[Tensor, bytes]:
        """Choose a token for each row; see `Sampler.sample`.

        The masks are asked for when all that needs none has been launched.

        Args:
            logits: [rows, vocab_size], fp32; changed.

        Returns:
            The token of each row, [rows], on the device, and `messages.StepResult.logprobs`.
        """
        rows = np.frombuffer(step.rows, ROW)
        if len(rows) == 0:
            return logits.new_empty(0, dtype=torch.int32), b""
        masked_rows = np.frombuffer(step.masked_rows, np.int32)
        hard = hard_rows(rows, masked_rows)
        copied = logits[self.send(hard.astype(np.int64))] if len(hard) else None
        columns = self._draws.send(np.frombuffer(step.rows, np.int32))
        if step.bias:
            add_biases(
                logits,
                columns[:, PLACES["bias_start"]],
                columns[:, PLACES["num_bias"]],
                self.send(np.frombuffer(step.bias_tokens, np.int32)),
                self.send(np.frombuffer(step.bias, np.float32)),
            )
        masks = NO_MASKS
        if len(masked_rows):
            masks = masks_of(len(masked_rows))
            apply_mask(logits, self.send(masked_rows), self.send(masks.view(np.int32)))
        tokens = self._draws.draw(logits)
        if copied is None:
            return tokens, b""
        drawn, logprobs = self.draw_on_host(copied.cpu().numpy(), step, hard, masked_rows, masks)
        tokens[self.send(hard.astype(np.int64))] = self.send(drawn)
        return tokens, logprobs

    def draw_on_host(
        self, logits: Floats, step: Step, hard: Int32s, masked_rows: Int32s, masks: Masks
    ) -> tuple[Int32s, bytes]:
        """Choose the tokens of some rows, of which these are the logits."""
        own, of_masks = np.nonzero(hard[:, None] == masked_rows)
        return self._on_host.sample(
            logits,
            np.frombuffer(step.rows, ROW)[hard],
            np.frombuffer(step.history, np.int32),
            np.frombuffer(step.bias_tokens, np.int32),
            np.frombuffer(step.bias, np.float32),
            own.astype(np.int32),
            masks[of_masks],
        )

    def send(self, numbers: npt.NDArray[np.generic]) -> Tensor:
        """Return numbers on the device; the host's may be changed at once."""
        return torch.from_numpy(numbers.copy()).to(self._device)


def hard_rows(rows: Rows, masked_rows: Int32s) -> Int32s:
    """Return the rows that are the host's.

    Among them are those with a mask and biases, which may leave no token together.
    """
    is_masked = np.zeros(len(rows), bool)
    is_masked[masked_rows] = True
    is_hard = (rows["num_logprobs"] >= 0) | (rows["num_history"] > 0) | (rows["target"] >= 0)
    return np.flatnonzero(is_hard | (is_masked & (rows["num_bias"] > 0))).astype(np.int32)
