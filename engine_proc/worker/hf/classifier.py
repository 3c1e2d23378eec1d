"""Runs cross-encoders in transformers' modules: two texts in, one number out."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from headrace.engine_proc.worker.checkpoints.safetensors import check_folder
from headrace.engine_proc.worker.execution.executor import Batch, Floats, sequence_rows
from headrace.engine_proc.worker.hf.executor import to_floats
from headrace.engine_proc.worker.hf.model import (
    load_module,
    on_device,
    open_config,
)
from headrace.engine_proc.worker.reference.torch_attention import to_tensor
from headrace.errors import ModelError
from headrace.model.pooling import DenseActivation

OWN_ATTENTION = None  # torch's own where a model can use it; DeBERTa's is its own


class Classifier:
    """Scores whole sequences; it has no cache, and reads no page table."""

    def __init__(self, module: PreTrainedModel, activation: DenseActivation) -> None:
        self.module = module
        self.activation = activation
        self.has_types = getattr(module.config, "type_vocab_size", 0) > 1

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Floats:
        """Return the score of each sequence, in the batch's order, [sequences, 1].

        They run one by one: each is long enough to keep all cores busy, and none is padded.
        """
        device, parts = self.module.device, []
        for rows in sequence_rows(batch):
            inputs = {"input_ids": to_tensor(batch.token_ids[rows], device)[None]}
            if self.has_types and batch.token_types is not None:
                inputs["token_type_ids"] = to_tensor(batch.token_types[rows], device)[None]
            parts.append(self.module(**inputs).logits[0].float())
        scores = torch.stack(parts)
        return to_floats(scores.sigmoid() if self.activation is DenseActivation.SIGMOID else scores)


def open_classifier(
    folder: Path, *, dtype: str, activation: DenseActivation, device: str = "cpu"
) -> Classifier:
    """Load the cross-encoder of a folder, without running code from it.

    Raises:
        ModelError: files are missing, broken or do not fit each other.
    """
    try:
        check_folder(folder)
        config = open_config(folder)
        auto_class = transformers.AutoModelForSequenceClassification
        module = load_module(folder, config, dtype, auto_class, OWN_ATTENTION)
    except ModelError as error:
        raise ModelError(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error
    return Classifier(on_device(module, device), activation)
