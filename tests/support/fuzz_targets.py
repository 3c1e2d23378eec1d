"""Fuzz targets: the readers of outside input, each of which must accept any bytes.

A target takes bytes. It returns, or raises what is none of the errors its subject may have. Seeds
are inputs that are right.
"""

import json
import struct
import tempfile
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf_files import TableEntry, serialized, write_decoder
from image_parts import encoded
from mmproj_seeds import mmproj_seed
from mutations import EDGES, Pieces
from parsed_texts import parser_seeds, run_parsers
from PIL import Image
from random_decoders import NUM_PAGES, SPEC, cpu

from headrace.cli.doctor import executor_of
from headrace.config.config import ServerConfig
from headrace.config.model_card import read_gguf
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.text import TableVocabulary, load_vocabulary
from headrace.engine_proc.request_io.intake import Intake
from headrace.engine_proc.request_io.resume_cache import ResumeCache
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.worker.checkpoints import gguf_tensors as gguf_weights
from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.execution.runner import GenerationRunner
from headrace.engine_proc.worker.models.gguf_architectures import ARCHITECTURES, MIXTURES
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.errors import InvalidValue, ModelError, RequestError
from headrace.ipc.fetcher_messages import Fetch, FromFetcher, ToFetcher
from headrace.ipc.messages import (
    Abort,
    Api,
    GeneratedTokens,
    GenerateRequest,
    HttpRequest,
    Message,
    RenewLeases,
    ResponseFrames,
    ResponsePlan,
    Sampling,
    StepOutput,
    StopSequence,
    Tensor,
    ToDetokenizer,
    ToEngine,
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
from headrace.model.gguf import GgufFile, read_metadata
from headrace.model.mmproj import PROJECTORS, read_mmproj
from headrace.model.mmproj_weights import tower_weights
from headrace.model.string_array import StringArray
from headrace.model.token_table import TokenTable
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.images.header import format_of
from headrace.tokenizer_proc.images.processor import decoded
from headrace.tokenizer_proc.images.sources import ImageSource, checked_header
from headrace.tokenizer_proc.jobs.stages import Text
from headrace.tokenizer_proc.requests.openai import ChatRequest, RequestMessage

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
RARE_KEYS = (  # of an architecture
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.dimension_count", "rope.dimension_sections", "rope.freq_base_swa", "expert_count",
    "attention.key_length", "attention.value_length", "attention.layer_norm_epsilon",
    "attention.sliding_window", "attention.sliding_window_pattern", "logit_scale",
)  # fmt: skip
TEXTS = ("none", "linear", "yarn", "longrope", "gpt2", "llama", "", "é")
PART_MARK, MAX_PARTS = b"\0--part--\0", 5  # between the parts of a split file


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
    plan = response_plan(Pieces(b"\1" * 20))
    messages: list[Message] = [
        HttpRequest(1, "POST", "/v1/x", 1.5, num_delivered={0: 3}),
        GenerateRequest(1, 0, 9, Sampling(logit_bias={3: 1.0}), [2], b"plan"),
        Abort(1), StopSequence(2), RenewLeases(), GeneratedTokens(bytes(8), bytes(4)),
        Fetch(1, 0, ["https://x/y"]), Encode([{"x": Tensor(0, 1, "f4", [2])}], [b""]),
        StepOutput.of({1: msgspec.msgpack.encode(plan)}, [1], [2], [None], cached={1: 2}),
        ResponseFrames.of({}, [1], [4], [True]),
        Step(**{name: b"\0" * 4 for name in Step.__struct_fields__[:6]}),
        StepResult(bytes(8)),
    ]  # fmt: skip
    return [msgspec.msgpack.encode(message) for message in messages]


def response_plan(pieces: Pieces) -> ResponsePlan:
    """Make some plan of a response."""
    flags = pieces.number(256)
    return ResponsePlan(
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
    responses = InflightResponses(
        TableVocabulary(TokenTable(TOKENS, frozenset([258]), False)), FRONTENDS
    )
    while not pieces.is_empty:
        num_rows = pieces.number(6)
        ids = array("Q", [SEQUENCES[pieces.number(len(SEQUENCES))] for _ in range(num_rows)])
        counts = array("I", [pieces.number(4) for _ in range(num_rows)])
        is_right = pieces.number(4) > 0
        tokens = array("I", [pieces.number(300) for _ in range(sum(counts))]).tobytes()
        output = StepOutput(
            started={id: msgspec.msgpack.encode(response_plan(pieces)) for id in ids[:3]},
            ids=ids.tobytes() if is_right else pieces.some(64),
            counts=counts.tobytes() if is_right else pieces.some(32),
            finished=bytes(255 - pieces.number(256) for _ in range(num_rows)),
        )
        try:
            responses.feed(output, tokens if is_right else pieces.some(64))
            for frontend in range(FRONTENDS):
                frames = responses.render(frontend)
                if frames is not None:
                    list(frames.message().split(frames.data()))
            responses.stops()
            responses.generated()
            len(responses)
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
        return pieces.some(32) if pieces.number(256) > 252 else array("i", numbers).tobytes()

    rows = bytearray()
    for _ in range(num_rows):
        floats = np.frombuffer(pieces.take(4 * len(FLOATS)), np.float32)
        numbers = struct.unpack("<5i", column(5, 2).ljust(20)[:20])
        top_k, num_logprobs, target, start, count = numbers
        row = SamplingRow(
            **dict(zip(FLOATS, floats, strict=True)),
            top_k=top_k,
            num_logprobs=min(num_logprobs, 200),
            target=target,
            history_slot=start,
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
        page_counts=column(pieces.number(3), 3),
        logit_rows=column(num_rows, num_tokens),
        rows=bytes(rows),
        history=column(3, SPEC.vocab_size),
        history_updates=column(3, 3),
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
    """Open a GGUF file, as each process that reads one does, and compute a token with it."""
    path = folder() / "model.gguf"
    path.write_bytes(data)
    open_gguf_everywhere(path)


def run_gguf_split(data: bytes) -> None:
    """Open a file of several parts by each of them; parts are missing, swapped or mutated."""
    parts = data.split(PART_MARK)[:MAX_PARTS]
    paths = [folder() / f"part-{n + 1:05}-of-{len(parts):05}.gguf" for n in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part)
    for path, part in zip(paths, parts, strict=True):
        if not part:
            path.unlink()
    for path in paths[:1] + paths[-1:]:
        open_gguf_everywhere(path)
    for path in paths:
        path.unlink(missing_ok=True)


@cache
def gguf_parts() -> list[tuple[GgufFile, bytes]]:
    """Return files that are right, and the bytes of their tensors."""
    path = folder() / "right.gguf"
    found = []
    for seed in gguf_seeds():
        path.write_bytes(seed)
        file = read_metadata(path)
        found.append((file, seed[min(tensor.offset for tensor in file.tensors) :]))
    return found


def run_gguf_values(data: bytes) -> None:
    """Open a GGUF file that is well formed, and has other values, types, names and shapes."""
    pieces = Pieces(data)
    file, weights = gguf_parts()[pieces.number(3)]
    name = file.metadata["general.architecture"]
    if pieces.number(2):  # nearly a file of another architecture
        names = [*ARCHITECTURES, *MIXTURES]
        name = names[pieces.number(len(names))]
    own = f"{file.metadata['general.architecture']}."
    metadata = {}
    for key, value in file.metadata.items():
        ours = f"{name}.{key.removeprefix(own)}" if key.startswith(own) else key
        metadata[ours] = list(value) if isinstance(value, StringArray) else value
    metadata["general.architecture"] = name
    if name not in ARCHITECTURES:
        metadata |= {f"{name}.expert_count": 4, f"{name}.expert_used_count": 2}
    start = min(tensor.offset for tensor in file.tensors)
    tensors = [(t.name, t.type, t.shape, t.offset - start) for t in file.tensors]
    while not pieces.is_empty:
        if pieces.number(4):
            change_value(pieces, metadata)
        else:
            change_tensor(pieces, tensors)
    path = folder() / "model.gguf"
    path.write_bytes(serialized(metadata, tensors, weights))
    open_gguf_everywhere(path)


def run_mmproj_values(data: bytes) -> None:
    """Open a projector file that is well formed, and has other values, types, names and shapes."""
    pieces = Pieces(data)
    seed = mmproj_seed([*PROJECTORS][pieces.number(len(PROJECTORS))])
    metadata, tensors = dict(seed.metadata), [*seed.tensors]
    while metadata and not pieces.is_empty:
        if pieces.number(4):
            change_value(pieces, metadata)
        else:
            change_tensor(pieces, tensors)
    path = folder() / "mmproj.gguf"
    path.write_bytes(serialized(metadata, tensors, seed.weights))
    with suppress(ModelError):
        tower_weights(read_mmproj(path, seed.decoder))


def change_value(pieces: Pieces, metadata: dict[str, Any]) -> None:
    """Change, add or remove a value."""
    name = metadata.get("general.architecture")
    keys = [*sorted(metadata), *(f"{name}.{key}" for key in RARE_KEYS), "split.count", "split.no"]
    key = keys[pieces.number(len(keys))]
    if pieces.number(16) == 1 and key in metadata:
        del metadata[key]
    else:
        metadata[key] = other_value(pieces, metadata.get(key, 0), [*metadata.values()])


def change_tensor(pieces: Pieces, tensors: list[TableEntry]) -> None:
    """Change an entry of the table of tensors."""
    place, source = pieces.number(len(tensors)), pieces.number(len(tensors))
    name, kind, shape, offset = tensors[place]
    tensors[place] = (
        tensors[source][0] if pieces.number(8) == 1 else name,
        pieces.number(42) if pieces.number(4) == 1 else kind,
        tensors[source][2] if pieces.number(4) == 1 else shape,
        pieces.number(1 << 64) if pieces.number(8) == 1 else offset,
    )


def other_value(pieces: Pieces, value: Any, others: list[Any]) -> Any:
    """Return a value that may be wrong in place of another one."""
    if isinstance(value, list) and value and pieces.number(2):
        place = pieces.number(len(value))
        inner = other_value(pieces, value[place], value)
        return [value[:place], value * 2, [*value[:place], inner, *value[place + 1 :]]][
            pieces.number(3)
        ]
    edge = EDGES[pieces.number(len(EDGES))]
    match pieces.number(8):
        case 0:
            return (edge & (1 << 63) - 1) * (-1) ** pieces.number(2)
        case 1:
            return [0.0, -1.0, 1e-40, 1e300, float("inf"), float("nan")][pieces.number(6)]
        case 2:
            return bool(pieces.number(2))
        case 3:
            return ["none", "linear", "yarn", "longrope", "gpt2", "llama", "", "é"][
                pieces.number(8)
            ]
        case 4:
            return []
        case 5 | 6:
            return others[pieces.number(len(others))]
    return pieces.number(256)


def open_gguf_everywhere(path: Path) -> None:
    """Open a file as processes around the engine do, as `headrace doctor` and a worker do."""
    bears(path, lambda: decode_all(gguf_weights.open_tensors(read_metadata(path))))
    bears(path, lambda: Encoder(str(path)).encode([Text("a ab cd", True)]))
    bears(path, lambda: load_vocabulary(str(path)))
    bears(path, lambda: prognosis(path))
    bears(path, lambda: compute_token(open_model(path)))


def prognosis(path: Path) -> str:
    """Return what `headrace doctor` says of a file, after a look at its card."""
    card = read_gguf(path)
    assert card.max_model_len > 0, card
    assert all(0 <= id < card.vocab_size for id in card.eos_token_ids), card
    return executor_of(ServerConfig(model=str(path)), card)


def compute_token(model: DecoderModel) -> None:
    """Load a model as a worker does, and compute a token."""
    one = np.zeros(1, np.int32)
    executor = CpuExecutor(
        model.spec,
        model.weights,
        num_pages=1,
        page_tokens=16,
        weight_dtype="packed",
        kv_dtype=KVDtype.BFLOAT16,
        rounds_activations=True,
        threads=1,
    )
    executor.logits(Batch(one, one, one, one.reshape(1, 1), one))


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
        assert str(path.parent) in str(error), error  # of a split file, any part


def decode_all(tensors: dict[str, StoredTensor]) -> None:
    for tensor in tensors.values():
        with np.errstate(all="ignore"):
            tensor.to_float32()


def gguf_seeds() -> list[bytes]:
    path = folder() / "seed.gguf"
    seeds = []
    for architecture, tokenizer in (("llama", "gpt2"), ("llama", "llama"), ("qwen2", "gpt2")):
        write_decoder(path, architecture, tokenizer)
        seeds.append(path.read_bytes())
    return seeds


def gguf_split_seeds() -> list[bytes]:
    parts = []
    for tokenizer in ("gpt2", "llama"):
        write_decoder(folder() / "seed.gguf", tokenizer=tokenizer, split_max_tensors=4)
        paths = sorted(folder().glob("seed-*.gguf"))
        parts.append([path.read_bytes() for path in paths])
        for path in paths:
            path.unlink()
    first, *others = parts[0]
    swapped = [*others, first]
    return [PART_MARK.join(each) for each in (*parts, swapped, [first, b"", *others[1:]])]


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
    "gguf_values": Target(run_gguf_values, column_seeds),
    "gguf_split": Target(run_gguf_split, gguf_split_seeds),
    "mmproj_values": Target(run_mmproj_values, column_seeds),
    "safetensors": Target(run_safetensors, safetensors_seeds),
    "template": Target(run_template, template_seeds),
    "image": Target(run_image, image_seeds),
    "parsers": Target(run_parsers, parser_seeds),
}
