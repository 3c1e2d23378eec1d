"""A model's vision tower and projector: from pixels to embeddings of the decoder.

They are transformers' own modules, with the weights of the model's folder or of a GGUF projector
file. The decoder is not loaded. An image encoded alone has bitwise reproducible rows. In a batch,
the last bits may depend on the other images.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from headrace.engine_proc.vision.mmproj_state import dtype_of, state_of
from headrace.engine_proc.worker.cuda.device_memory import fitting
from headrace.errors import ModelError
from headrace.model.gguf import read_metadata
from headrace.model.mmproj import read_mmproj
from headrace.model.vision_families import FAMILIES, num_deepstack
from headrace.system.machine import usable_cores

SLACK_BYTES = 64 << 20  # beyond that, for small tensors: torch takes memory in pieces of 2 MiB
# Further fields that count layers, or what they need.
DECODER_COUNTS = ("num_kv_shared_layers", "hidden_size_per_layer_input")
BY_IMAGE = ("image_grid_thw", "image_sizes", "image_position_ids")  # have a row for each image

Tensors = Mapping[str, npt.NDArray[Any]]  # of one image, as its processor names them
Floats = npt.NDArray[np.float32]


class Tower:
    """Computes rows of images. On a CPU it uses torch's number of threads.

    Args:
        module: what `load` returns.
        device: where it is.
    """

    def __init__(self, module: Any, device: str = "cpu") -> None:
        self.module = module
        self._device = torch.device(device)
        self._names = inspect.signature(module.get_image_features).parameters.keys()
        config = module.config.to_dict()
        self.row_size = module.config.get_text_config().hidden_size * (1 + num_deepstack(config))

    @torch.inference_mode()
    def encode(self, images: Sequence[Tensors]) -> list[Floats]:
        """Return the rows of each image, [rows, row_size], by one call.

        Args:
            images: what the processor makes of them; tensors of the same name differ in their first
                lengths alone. A batch's dimension of tiles may be there or not. What the tower does
                not take, such as how many tiles there are, is passed over.
        """
        taken = [self._taken(image) for image in images]
        inputs = {name: self._joined([one[name] for one in taken]) for name in taken[0]}
        made = self.module.get_image_features(**inputs)
        deepstack = getattr(made, "deepstack_features", None) or []
        parts = zip(made.pooler_output, *deepstack, strict=True)
        features = [torch.cat(part, -1) for part in parts]
        # Features come by grid or size, where there is one, else by tile: an image may have some.
        counted = next((name for name in BY_IMAGE if name in taken[0]), "pixel_values")
        counts = [len(one[counted]) for one in taken]
        assert sum(counts) == len(features), f"{len(features)} parts of images, not {counts}"
        sizes = [feature.numel() // self.row_size for feature in features]
        ends = [sum(sizes[:end]) for end in accumulate(counts)]
        rows: Floats = torch.cat(features).float().cpu().numpy().reshape(-1, self.row_size)
        return np.split(rows, ends[:-1])

    def _taken(self, image: Tensors) -> Tensors:
        """Return what the tower takes; tiles one by one, or beside others they would be padded."""
        taken = {name: tensor for name, tensor in image.items() if name in self._names}
        if "pixel_attention_mask" not in self._names or "spatial_shapes" in self._names:
            is_batch = taken["pixel_values"].ndim == 5  # of one image's tiles
            return taken | {"pixel_values": taken["pixel_values"][0]} if is_batch else taken
        num_dims = {"pixel_values": 3, "pixel_attention_mask": 2}  # of a tile
        return {
            name: tensor.reshape(-1, 1, *tensor.shape[-num_dims[name] :])
            for name, tensor in taken.items()
        }

    def _joined(self, tensors: list[npt.NDArray[Any]]) -> Tensor:
        """Return tensors as one, copied to where torch likes to have it: how it lies in memory may
        change last bits."""
        return torch.cat([torch.tensor(tensor) for tensor in tensors]).to(self._device)

    def check(self) -> None:
        """Raise if the device has failed for good, as a GPU does after an illegal access."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def load(folder: Path | str, dtype: str = "float32", is_dummy: bool = False) -> Any:
    """Load a model onto the CPU, its decoder without layers and with a vocabulary of one token.

    Args:
        dtype: "auto" is the checkpoint's own.
        is_dummy: make weights up, the same each time; the folder may have none.

    Raises:
        ModelError: there is no tower that is supported, or some of its weights are missing.
    """
    set_up()
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in FAMILIES:
            raise ModelError(f"{folder}: a {config.model_type} model takes no images here")
        leave_out_decoder(config)
        if is_dummy:
            torch.manual_seed(0)
            own = {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}
            make: Any = transformers.AutoModel.from_config
            return make(config, **own).eval()
        module, report = transformers.AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
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


def load_mmproj(path: Path | str, decoder: Path | str, dtype: str = "float32") -> Any:
    """Load a GGUF projector file onto the CPU, as `load` does a folder.

    Args:
        decoder: the GGUF file that it is for.
        dtype: "auto" is the type of most of its numbers, float16 if they are quantized.

    Raises:
        ModelError: it is none that is supported, or some of its weights are missing.
    """
    set_up()
    mmproj = read_mmproj(Path(path), read_metadata(decoder))
    dtype = dtype_of(mmproj.file) if dtype == "auto" else dtype
    kind: torch.dtype = getattr(torch, dtype)
    state = {name: torch.from_numpy(own).to(kind) for name, own in state_of(mmproj).items()}
    kinds: Any = transformers.AutoConfig
    config = kinds.for_model(**mmproj.folder.config)
    leave_out_decoder(config)
    modules: Any = transformers.MODEL_MAPPING
    module, report = modules[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    assert not (report["mismatched_keys"] or report["unexpected_keys"]), report
    return module.eval()


def set_up() -> None:
    """Have torch use all cores, and transformers be silent."""
    torch.set_num_threads(usable_cores())
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def leave_out_decoder(config: Any) -> None:
    """Change a config so that its decoder has no layers and a vocabulary of one token.

    Towers for sound are left out, too.
    """
    if config.model_type == "gemma4":
        config.audio_config = None
    text = config.get_text_config()
    for name in set(DECODER_COUNTS) & text.to_dict().keys():
        setattr(text, name, 0)
    text.num_hidden_layers, text.layer_types = 0, []
    text.vocab_size, text.pad_token_id = 1, None


def move_to_gpu(module: Any, device: str, num_bytes: int) -> int:
    """Move a tower to a GPU, and take memory there for its calls, which never have more.

    Args:
        num_bytes: for calls.

    Returns:
        What this process has of the GPU from now on, in bytes.

    Raises:
        ConfigError: there is no room.
    """
    torch.backends.cudnn.allow_tf32 = False  # fp32 is meant where it is asked for
    with fitting("the vision tower", "end others that use it, or use --device cpu"):
        module.to(device)
        most = torch.cuda.memory_reserved(device) + num_bytes + SLACK_BYTES
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
        torch.empty(num_bytes, dtype=torch.uint8, device=device)  # which torch keeps
    return most
