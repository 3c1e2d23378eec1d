"""Random decoders of transformers."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import transformers

CONSTANT = ("bias", "sinks")


def random_model(case: str, fields: Mapping[str, Any], constant: tuple[str, ...] = CONSTANT) -> Any:
    """Make the model of a case, whose name begins with the family's.

    Args:
        fields: of its config.
        constant: ends of the names of numbers that start the same for all, as norms do.
    """
    torch.manual_seed(0)
    family = case.split()[0]
    config = transformers.AutoConfig.for_model(family, **fields)
    make = transformers.AutoModelForCausalLM.from_config
    if family == "mistral4":  # which Auto does not know
        make = transformers.Mistral4ForCausalLM._from_config
    model = make(config, dtype=torch.float32, attn_implementation="eager")
    for name, numbers in itertools.chain(model.named_parameters(), model.named_buffers()):
        if "norm" in name or name.endswith(constant):
            numbers.data += 0.3 * torch.randn_like(numbers)
    return model.eval()
