"""A model's vision tower and projector: from pixels to rows that the decoder takes.

They are transformers' own modules, in fp32, with the weights of the model's folder. Nothing of the
decoder is loaded. Images are computed one by one: in a batch, the last bits of a row would depend
on the other images (they do for LLaVA's tower), and one image keeps two cores as busy as four do.
Only tiny ones of Qwen2.5-VL would gain: 64 patches take 90 ms alone and 68 among four.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from headrace.errors import ModelError
from headrace.vision import FAMILIES

Tensors = Mapping[str, npt.NDArray[Any]]  # of one image, as its processor names them
Floats = npt.NDArray[np.float32]


class Tower:
    """Makes rows of images. With as many threads as torch is told to use."""

    def __init__(self, folder: Path | str) -> None:
        """Load the weights.

        Raises:
            ModelError: there is no tower that is supported, or some of its weights are missing.
        """
        self.module = load(Path(folder))
        self._names = inspect.signature(self.module.get_image_features).parameters.keys()
        self.row_size: int = self.module.config.get_text_config().hidden_size

    @torch.inference_mode()
    def encode(self, image: Tensors) -> Floats:
        """Return the rows of an image, [rows, row_size], a function of the image alone.

        Args:
            image: what the processor makes of it; a batch's dimension may be there or not. What the
                tower does not take, such as how many tiles there are, is passed over.
        """
        # Copied to where torch likes to have tensors: how they lie in memory may change last bits.
        taken = {name: torch.tensor(tensor) for name, tensor in self._taken(image).items()}
        features: Sequence[Tensor] = self.module.get_image_features(**taken).pooler_output
        rows: Floats = torch.cat(list(features)).float().numpy().reshape(-1, self.row_size)
        return rows

    def _taken(self, image: Tensors) -> Tensors:
        """Return what the tower takes; tiles one by one, or beside others they would be padded."""
        taken = {name: tensor for name, tensor in image.items() if name in self._names}
        if "pixel_attention_mask" not in self._names:
            return taken
        num_dims = {"pixel_values": 3, "pixel_attention_mask": 2}  # of a tile
        return {
            name: tensor.reshape(-1, 1, *tensor.shape[-num_dims[name] :])
            for name, tensor in taken.items()
        }


def load(folder: Path) -> Any:
    """Load a model without the layers of its decoder, and with a vocabulary of one token."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in FAMILIES:
            raise ModelError(f"{folder}: a {config.model_type} model takes no images here")
        text = config.get_text_config()
        text.num_hidden_layers, text.layer_types = 0, []
        text.vocab_size, text.pad_token_id = 1, None
        module, report = transformers.AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # and report them
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:  # whatever transformers finds wrong with the files
        raise ModelError(f"{folder}: the vision tower cannot be loaded: {error}") from error
    wrong = {name for name, *_ in report["mismatched_keys"]} | report["missing_keys"]
    wrong = {name for name in wrong if not name.endswith("embed_tokens.weight")}
    if wrong:
        raise ModelError(f"{folder}: {min(wrong)!r} is missing or has the wrong shape")
    return module.eval()
