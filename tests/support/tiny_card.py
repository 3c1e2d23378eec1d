"""The card of a model that has no files."""

from headrace.config.process_configs import ModelCard

TINY_CARD = ModelCard(
    path="",
    name="tiny",
    max_model_len=100,
    vocab_size=256,
    eos_token_ids=[],
    chat_template=None,
    special_tokens={},
)
