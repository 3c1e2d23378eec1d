"""A Hugging Face folder, served: safetensors, tokenizer.json and the template beside them."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import transformers
from servers import RunningServer

from headrace.model_card import find_demo_model
from headrace.tokenizer_json import read_tokenizer_json

PROMPT = [504, 3575, 282, 4649, 314]
NUM_TOKENS = 24


def make_folder(folder: Path, model_type: str) -> Any:
    """Save a small random model in bf16, with the demo model's tokenizer; return it in fp32."""
    demo = find_demo_model()
    assert demo is not None, "install the demo model: make install"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(read_tokenizer_json(demo))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    settings = {"chat_template": template}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    return model.to(torch.float32)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])  # the C++ core, transformers
def test_folder_is_served_exactly_and_by_its_own_name(model_type: str, tmp_path: Path) -> None:
    folder = tmp_path / f"tiny-{model_type}"
    model = make_folder(folder, model_type)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
    generated = output[0, len(PROMPT) :].tolist()
    server = RunningServer(str(folder), "--dtype", "float32", "--kv-cache-dtype", "float32")
    try:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "model": folder.name}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        again = {"prompt": PROMPT + generated[:8], "max_tokens": NUM_TOKENS - 8, "temperature": 0}
        rest = httpx.post(f"{server.url}/v1/completions", json=again, timeout=60).json()
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
    finally:
        server.stop()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert answer["choices"][0]["text"] == tokenizer.decode(generated, skip_special_tokens=True)
    assert answer["choices"][0]["text"].endswith(rest["choices"][0]["text"])
    assert answer["usage"]["completion_tokens"] == len(generated)
    assert reply.status_code == 200, reply.text
