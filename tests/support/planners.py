"""Planners of a model whose tokens are bytes."""

from typing import Any

from byte_encoder import ByteEncoder, finish

from headrace.config.process_configs import ModelCard
from headrace.ipc.messages import HttpRequest, request_id
from headrace.model.output_formats import ThoughtFormat, ToolFormat
from headrace.model.pooling import Pooling, PoolingKind
from headrace.model.sampling_defaults import OPENAI, SamplingDefaults
from headrace.tokenizer_proc.embedding_planner import EmbeddingPlanner
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.encoding.token_bytes import TokenBytes
from headrace.tokenizer_proc.generation import GenerationPlanner
from headrace.tokenizer_proc.jobs.stages import Encoding, Outcome, Sequences
from headrace.tokenizer_proc.requests.constraints import Constraint

ID = request_id(0, 5)
HTTP = HttpRequest(ID, "POST", "/v1/completions", 1234.75)
EOS = 2


class Planner:
    """Both planners; texts are encoded as soon as they are wanted."""

    def __init__(
        self, encoder: ByteEncoder, generation: GenerationPlanner, embedding: EmbeddingPlanner
    ) -> None:
        self.encoder = encoder
        self.generation = generation
        self.embedding = embedding

    def plan(self, kind: str, http: HttpRequest, body: bytes) -> Sequences:
        sequences = self.handle(kind, http, body)
        assert isinstance(sequences, Sequences)
        return sequences

    def handle(self, kind: str, http: HttpRequest, body: bytes) -> Outcome:
        planner = self.generation if hasattr(self.generation, kind) else self.embedding
        outcome: Outcome = finish(getattr(planner, kind)(http, body), self.encoder)
        return outcome


class Echo:
    """Grammars that are their own sources, after what comes first, and known at once."""

    def compiled(self, param: str, constraint: Constraint) -> Encoding[bytes]:
        calls = "".join(constraint.calls[:1])
        return f"{param}: {calls}{constraint.thoughts}{constraint.source}".encode()
        yield []


def make_planner(
    max_model_len: int = 100,
    num_detokenizers: int = 1,
    embeds: bool = False,
    encoder: ByteEncoder | None = None,
    chat_template: str = "{% for m in messages %}{{ m.content }}{% endfor %}:",
    tool_format: ToolFormat | None = None,
    thought_format: ThoughtFormat | None = None,
    sampling_defaults: SamplingDefaults = OPENAI,
    compares: bool = False,
    prompts: dict[str, str] | None = None,
    is_prefix_lm: bool = False,
) -> Planner:
    pooling = None
    if embeds or compares:
        pooling = Pooling(PoolingKind.LAST, scores=compares, prompts=prompts or {})
    card = ModelCard(
        path="/model",
        name="tiny",
        max_model_len=max_model_len,
        vocab_size=256,
        eos_token_ids=[EOS],
        chat_template=chat_template,
        special_tokens={},
        pooling=pooling,
        embedding_size=4 if embeds else None,
        is_prefix_lm=is_prefix_lm,
        tool_format=tool_format,
        thought_format=thought_format,
        sampling_defaults=sampling_defaults,
    )
    encoder = encoder or ByteEncoder()
    template = ChatTemplate(card.chat_template, card.special_tokens)
    grammars: Any = Echo()
    return Planner(
        encoder,
        GenerationPlanner(card, template, encoder, num_detokenizers, 1000, grammars),
        EmbeddingPlanner(card, template, encoder, num_detokenizers),
    )


class LongTokens(ByteEncoder):
    """Claims that a token stands for up to 4 bytes, and x for nothing."""

    token_bytes = TokenBytes(longest=4, lost=b"x")
