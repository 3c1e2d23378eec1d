"""The type that GPUs compute in, from `--dtype`, other flags and the model."""

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    Mamba2Spec,
    NormPlacement,
)
from headrace.errors import ModelError


def dtype_on_gpus(config: ExecutionConfig, model: DecoderModel) -> str:
    """Return the type that GPUs compute one of our decoders in.

    float16 ends at 65504, which Gemma 2's and 3's layers pass. States of Mamba-2 and activations
    that are squared may. Where `--quantization fp8` rounds to fewer bits anyhow, bfloat16 has the
    quicker product. Pages are of the same type.

    Raises:
        ModelError: it was to be float16, and the model's numbers are too large for that.
    """
    asked = config.dtype
    has_mamba2 = any(isinstance(layer.mixer, Mamba2Spec) for layer in model.spec.layers)
    is_large = (
        model.spec.placement == NormPlacement.PRE_POST
        or has_mamba2
        or model.spec.activation in (Activation.RELU2, Activation.XIELU)
    )
    if asked == "float16" and is_large:
        raise ModelError(
            f"--dtype float16 ends at 65504, which {model.spec.architecture} models pass; "
            "use bfloat16 or float32"
        )
    if asked != "auto":
        return asked
    is_wide = is_large or config.quantization != "none" or config.kv_cache_dtype == "bfloat16"
    is_stored = model.weights["embed"].format == Format.F16
    return "float16" if is_stored and not is_wide else "bfloat16"
