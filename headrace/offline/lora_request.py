"""An adapter (LoRA) that an `Engine` is given with a prompt."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name and the path of its files, as vLLM's class of this name."""

    lora_name: str
    lora_int_id: int  # vLLM's; the name tells adapters apart
    lora_path: str | os.PathLike[str]
