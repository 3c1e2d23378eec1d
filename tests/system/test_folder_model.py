"""A Hugging Face folder, served: safetensors, tokenizer.json and the template beside them."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from servers import RunningServer
from tiny_models import make_folder

PROMPT = [504, 3575, 282, 4649, 314]
NUM_TOKENS = 24
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,  # as in those that are published
    }
}


# The C++ core, with experts on two workers; transformers by two, with heads that are normed.
@pytest.mark.parametrize(
    ("model_type", "tp", "impl"),
    [
        ("llama", "1", "auto"),
        ("mixtral", "2", "auto"),
        ("qwen3_moe", "2", "transformers"),
    ],
)
def test_folder_is_served_exactly_and_by_its_own_name(
    model_type: str, tp: str, impl: str, tmp_path: Path
) -> None:
    folder = tmp_path / f"tiny-{model_type}"
    model = make_folder(folder, model_type, **FIELDS.get(model_type, {}))
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
    generated = output[0, len(PROMPT) :].tolist()
    exact = ("--dtype", "float32", "--kv-cache-dtype", "float32")
    server = RunningServer(str(folder), *exact, "--tp", tp, "--model-impl", impl)
    try:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "model": folder.name}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        again = {"prompt": PROMPT + generated[:8], "max_tokens": NUM_TOKENS - 8, "temperature": 0}
        rest = httpx.post(f"{server.url}/v1/completions", json=again).json()
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=chat)
    finally:
        server.stop()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert answer["choices"][0]["text"] == tokenizer.decode(generated, skip_special_tokens=True)
    assert answer["choices"][0]["text"].endswith(rest["choices"][0]["text"])
    assert answer["usage"]["completion_tokens"] == len(generated)
    assert response.status_code == 200, response.text
