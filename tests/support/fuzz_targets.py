"""Fuzz targets: the readers of outside input, each of which must accept any bytes.

A target takes bytes. It returns, or raises what is none of the errors its subject may have. Seeds
are inputs that are right.
"""

import json
import struct
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from image_parts import encoded
from mutations import Pieces
from PIL import Image
from random_decoders import NUM_PAGES, SPEC, cpu

from headrace.config.model_card import read_gguf
from headrace.detokenizer_proc.replies import Replies
from headrace.detokenizer_proc.text import TableVocabulary
from headrace.engine_proc.request_io.intake import Intake
from headrace.engine_proc.request_io.resume_cache import ResumeCache
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.worker.checkpoints import gguf_tensors as gguf_weights
from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.runner import GenerationRunner
from headrace.errors import InvalidValue, ModelError, RequestError
from headrace.ipc.messages import (
    Abort,
    Api,
    Fetch,
    FromFetcher,
    GeneratedTokens,
    GenerateRequest,
    HttpRequest,
    Message,
    RenewLeases,
    ReplyPlan,
    ResponseFrames,
    Sampling,
    StepOutput,
    StopSequence,
    Tensor,
    ToDetokenizer,
    ToEngine,
    ToFetcher,
    ToFrontend,
    ToTokenizer,
    request_id,
)
from headrace.ipc.worker_messages import (
    SAMPLING_CODES,
    SAMPLING_ROW,
    Encode,
    FromVision,
    FromWorker,
    SamplingRow,
    Step,
    StepResult,
    ToVision,
    ToWorker,
)
from headrace.model.gguf import read_metadata
from headrace.model.token_table import TokenTable
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.apis.openai import ChatRequest, RequestMessage
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.images.header import format_of
from headrace.tokenizer_proc.images.processor import decoded
from headrace.tokenizer_proc.images.sources import ImageSource, checked_header

# A process that is sent nonsense by another of its server ends: as Python does, loudly.
LOUD = (AssertionError, ValueError, TypeError, LookupError, OverflowError, StopIteration)
LOUD += (struct.error, msgspec.MsgspecError, RecursionError)
UNIONS = (ToTokenizer, ToEngine, ToDetokenizer, ToFrontend, ToWorker, FromWorker)
UNIONS += (ToFetcher, FromFetcher, ToVision, FromVision)
FRONTENDS = 2
SEQUENCES = [request_id(f, c) + s for f in range(FRONTENDS + 1) for c in (1, 2) for s in (0, 1)]
TOKENS = [bytes([byte]) for byte in range(256)] + ["é".encode(), b"\xf0\x9f", b"<end>"]
TEMPLATE_CPU_S = 0.2
FLOATS = [name for name, code in SAMPLING_CODES.items() if code == "f"]  # of a sampling row
MAX_PIXELS = 100_000


@dataclass(frozen=True)
class Target:
    """Something that reads bytes, and bytes that are right."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


# Messages


def run_decoders(data: bytes) -> None:
    """Decode bytes as each union."""
    for union in UNIONS:
        try:
            msgspec.msgpack.decode(data, type=union)
        except LOUD:
            continue


def decoder_seeds() -> list[bytes]:
    plan = reply_plan(Pieces(b"\1" * 20))
    messages: list[Message] = [
        HttpRequest(1, "POST", "/v1/x", 1.5, num_delivered={0: 3}),
        GenerateRequest(1, 0, 9, Sampling(logit_bias={3: 1.0}), [2], b"plan"),
        *(Abort(1), StopSequence(2), RenewLeases(), GeneratedTokens(bytes(8), bytes(4))),
        *(Fetch(1, 0, ["https://x/y"]), Encode([{"x": Tensor(0, 1, "f4", [2])}], [b""])),
        StepOutput.of({1: msgspec.msgpack.encode(plan)}, [1], [2], [None], cached={1: 2}),
        ResponseFrames.of({}, [1], [4], [True]),
        Step(**{name: b"\0" * 4 for name in Step.__struct_fields__[:6]}),
        StepResult(bytes(8)),
    ]
    return [msgspec.msgpack.encode(message) for message in messages]


def reply_plan(pieces: Pieces) -> ReplyPlan:
    """Make some plan of a reply."""
    flags = pieces.number(256)
    return ReplyPlan(
        response_id="x",
        model="m",
        created=1,
        api=Api.CHAT if flags & 1 else Api.COMPLETION,
        stream=bool(flags & 2),
        include_usage=bool(flags & 4),
        num_sequences=1 + (flags >> 3 & 1),
        num_prompt_tokens=1,
        index=flags >> 4 & 1,
        stop=["é", "ab"] if flags & 32 else [],
        include_stop=bool(flags & 64),
        skip_special_tokens=bool(flags & 128),
        logprobs=1 if pieces.number(8) == 1 else None,
        num_delivered=pieces.number(1 << 32) if pieces.number(4) == 1 else None,
    )


def run_step_output(data: bytes) -> None:
    """Render steps with arbitrary columns."""
    pieces = Pieces(data)
    replies = Replies(TableVocabulary(TokenTable(TOKENS, frozenset([258]), False)), FRONTENDS)
    while not pieces.is_empty:
        num_rows = pieces.number(6)
        ids = array("Q", [SEQUENCES[pieces.number(len(SEQUENCES))] for _ in range(num_rows)])
        counts = array("I", [pieces.number(4) for _ in range(num_rows)])
        is_right = pieces.number(4) > 0
        tokens = array("I", [pieces.number(300) for _ in range(sum(counts))]).tobytes()
        output = StepOutput(
            started={id: msgspec.msgpack.encode(reply_plan(pieces)) for id in ids[:3]},
            ids=ids.tobytes() if is_right else pieces.some(64),
            counts=counts.tobytes() if is_right else pieces.some(32),
            finished=bytes(255 - pieces.number(256) for _ in range(num_rows)),
        )
        try:
            replies.feed(output, tokens if is_right else pieces.some(64))
            for frontend in range(FRONTENDS):
                frames = replies.render(frontend)
                if frames is not None:
                    list(frames.message().split(frames.data()))
            replies.stops()
            replies.generated()
            len(replies)
        except LOUD:
            return


def run_columns(data: bytes) -> None:
    """Handle the other messages with columns."""
    pieces = Pieces(data)
    ids, counts, bulk = pieces.some(40), pieces.some(24), pieces.some(64)
    request = GenerateRequest(1, 0, 1, Sampling(), [], b"")
    for take in (
        lambda: list(ResponseFrames({}, ids, counts, bulk[:8], bulk[8:]).split(bulk)),
        lambda: list(StepOutput({}, ids, counts, bulk).rows()),
        lambda: ResumeCache().keep(GeneratedTokens(ids, counts), bulk, 0.0),
        lambda: Intake().renew(memoryview(bulk).cast("B").cast("Q"), 0.0),
        lambda: Sequence.of(request, bulk),
        lambda: outcome_of(StepResult(ids, bulk, counts)),
    ):
        try:
            take()
        except LOUD:
            continue


def outcome_of(result: StepResult) -> None:
    outcome = ResultReader(result, 2)
    for num_top in range(4):
        outcome.token()
        outcome.logprob(num_top)
        outcome.embedding()


@cache
def runner() -> GenerationRunner:
    """A worker's, with a small model."""
    return GenerationRunner(cpu(SPEC, threads=1), Sampler(SPEC.vocab_size, threads=1))


def run_step(data: bytes) -> None:
    """Compute a step of which some columns are out of range, or of the wrong length."""
    pieces = Pieces(data)
    num_tokens, num_rows = 1 + pieces.number(4), pieces.number(3)
    edges = (-1, 15, SPEC.vocab_size, NUM_PAGES, 1 << 20, -(1 << 31), (1 << 31) - 1)

    def column(size: int, limit: int) -> bytes:
        numbers = (
            edges[pieces.number(len(edges))] if pieces.number(256) > 250 else pieces.number(limit)
            for _ in range(size)
        )
        data = array("i", numbers).tobytes()
        return pieces.some(32) if pieces.number(256) > 252 else data

    rows = bytearray()
    for _ in range(num_rows):
        floats = np.frombuffer(pieces.take(24), np.float32)
        top_k, num_logprobs, target, start, count = struct.unpack(
            "<5i", column(5, 2).ljust(20)[:20]
        )
        row = SamplingRow(
            **dict(zip(FLOATS, floats, strict=True)),
            top_k=top_k,
            num_logprobs=min(num_logprobs, 200),
            target=target,
            history_start=start,
            num_prompt=min(start, 1),
            num_history=count,
            bias_start=start,
            num_bias=count,
        )
        rows += SAMPLING_ROW.pack(*row)
    step = Step(
        token_ids=column(num_tokens, SPEC.vocab_size),
        positions=column(num_tokens, 20),
        sequences=column(num_tokens, 1),
        page_table=column(2, NUM_PAGES),
        logit_rows=column(num_rows, num_tokens),
        rows=bytes(rows),
        history=column(3, SPEC.vocab_size),
        bias_tokens=column(3, SPEC.vocab_size),
        bias=pieces.take(12),
    )
    try:
        runner().run(step)
    except LOUD:
        return


def column_seeds() -> list[bytes]:
    return [bytes(64), b"\1" * 64, bytes(range(64)), bytes([3, 1, 2] * 40)]


# Files of models


@cache
def folder() -> Path:
    """A folder in memory, gone with the process."""
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    made = tempfile.TemporaryDirectory(prefix="headrace-fuzz-", dir=where)
    folder.keep = made  # type: ignore[attr-defined]
    return Path(made.name)


def run_gguf(data: bytes) -> None:
    """Open a GGUF file, as processes around the engine do and as a worker does."""
    path = folder() / "model.gguf"
    path.write_bytes(data)
    bears(path, lambda: decode_all(gguf_weights.open_tensors(read_metadata(path))))
    bears(path, lambda: read_gguf(path))
    bears(path, lambda: read_tokenizer_json(path))


def run_safetensors(data: bytes) -> None:
    """Open a safetensors file."""
    path = folder() / "model.safetensors"
    path.write_bytes(data)
    bears(path, lambda: decode_all(safetensors.open_folder(folder())))
    bears(path, lambda: safetensors.check_folder(folder()))


def bears(path: Path, read: Callable[[], object]) -> None:
    """Read a file; the one error there may be names it."""
    try:
        read()
    except ModelError as error:
        assert str(path) in str(error), error


def decode_all(tensors: dict[str, StoredTensor]) -> None:
    for tensor in tensors.values():
        with np.errstate(all="ignore"):
            tensor.to_float32()


def gguf_seeds() -> list[bytes]:
    import gguf

    path = folder() / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.context_length", 64)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_bool("a.bool", True)
    writer.add_float32("a.float", 0.5)
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "Ġthe"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.0, -2.0])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    writer.add_array("some.ints", [3, -1, 2])
    writer.add_tensor("plain", np.ones((2, 3), np.float32))
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        packed = gguf.quantize(np.ones((2, 32), np.float32), kind)
        writer.add_tensor(kind.name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path.read_bytes()]


def safetensors_seeds() -> list[bytes]:
    def of(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(64)

    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
    half = {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]}
    deep = b'{"a":' + b"[" * 5000
    return [
        of({"__metadata__": {"format": "pt"}, "a": entry, "b": half}),
        of({"a": entry | {"dtype": "I64"}}),
        len(deep).to_bytes(8, "little") + deep,
    ]


# Templates of clients


@cache
def templates() -> ChatTemplate:
    return ChatTemplate(None, {"bos_token": "<s>"}, TEMPLATE_CPU_S, trusts_requests=True)


def run_template(data: bytes) -> None:
    """Render a template that a client brings."""
    request = ChatRequest(
        messages=[RequestMessage("user", "Hi"), RequestMessage("assistant", "Ho")],
        chat_template=data.decode(errors="replace"),
    )
    try:
        assert isinstance(templates().render(request), str)
    except RequestError as error:
        assert error.status == 400


def template_seeds() -> list[bytes]:
    sources = [
        "{% for m in messages %}{{ m.role }}: {{ m['content'] | upper }}\n{% endfor %}",
        "{% set x = namespace(n=0) %}{% for i in range(9) %}{% set x.n = x.n + i %}{% endfor %}",
        "{% macro f(a, b=1) %}{{ a ~ b }}{% endmacro %}{{ f(messages[0].content, 2) }}",
        "{% if messages | length > 1 %}{{ messages | tojson }}{% elif x is defined %}{% endif %}",
        "{{ 'ab' * 3 }}{{ 2 ** 9 }}{{ [1, 2] * 4 }}{{ '%s' % 'x' }}{{ 'a'.join(['b', 'c']) }}",
        "{{ raise_exception('no') }}{{ ''.__class__.__mro__ }}{{ strftime_now('%Y') }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' | center(99) }}{{ '%99d' % 1 }}{{ '{:>99}'.format(1) }}{{ 'a'.ljust(99) }}",
    ]
    return [source.encode() for source in sources]


# Images


def run_image(data: bytes) -> None:
    """Read an image's header and decode it; it is accepted with its claimed size, or refused."""
    kind = f"image/{format_of(data).lower()}"
    try:
        header = checked_header(data, kind, "x")
        if header.width * header.height > MAX_PIXELS:
            return  # bounded, but slow
        image = decoded(ImageSource(data, header, "x"))
    except InvalidValue as error:
        assert str(error).startswith("x: ")
    else:
        assert image.mode == "RGB"
        assert sorted(image.size) == sorted((header.width, header.height))


def image_seeds() -> list[bytes]:
    picture = Image.new("RGB", (9, 6), (200, 10, 30))
    turned = Image.Exif()
    turned[0x0112] = 6  # its orientation
    return [
        encoded(picture),
        encoded(picture.convert("P"), exif=turned),
        encoded(picture.convert("I;16")),
        encoded(picture, "JPEG", exif=turned),
        encoded(picture.convert("CMYK"), "JPEG", progressive=True),
        encoded(picture, "WEBP", exif=turned),
        encoded(picture, "WEBP", lossless=True),
        encoded(picture, "GIF", save_all=True, append_images=[Image.new("RGB", (9, 6))]),
    ]


TARGETS = {
    "decoders": Target(run_decoders, decoder_seeds),
    "step_output": Target(run_step_output, column_seeds),
    "columns": Target(run_columns, column_seeds),
    "step": Target(run_step, column_seeds),
    "gguf": Target(run_gguf, gguf_seeds),
    "safetensors": Target(run_safetensors, safetensors_seeds),
    "template": Target(run_template, template_seeds),
    "image": Target(run_image, image_seeds),
}
