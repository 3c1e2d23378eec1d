"""A fingerprint of the message schemas, which processes must share."""

import hashlib
from typing import get_args, get_type_hints

from headrace import __version__
from headrace.ipc.fetcher_messages import FromFetcher, ToFetcher
from headrace.ipc.messages import (
    Api,
    FinishReason,
    GenerateForm,
    Head,
    Image,
    Parsing,
    Plan,
    ResponsesForm,
    Sampling,
    Tensor,
    Times,
    ToDetokenizer,
    ToEngine,
    ToFrontend,
    ToTokenizer,
)
from headrace.ipc.remote_messages import FromGateway, FromStage, ToGateway, ToStage
from headrace.ipc.token_logprobs import PAIR, ROW
from headrace.ipc.worker_messages import SAMPLING_ROW, FromVision, FromWorker, ToVision, ToWorker
from headrace.model.output_formats import ThoughtFormat, ToolFormat


def code_version() -> str:
    """Return the version of this code, which machines share that have replicas of each other."""
    return f"{__version__}, messages {fingerprint()}"


def fingerprint() -> str:
    """Return a hash of all message definitions: processes that disagree must not talk."""
    lines = []
    for union in (
        ToTokenizer,
        ToEngine,
        ToDetokenizer,
        ToFrontend,
        ToFetcher,
        FromFetcher,
        ToWorker,
        FromWorker,
        ToVision,
        FromVision,
        ToGateway,
        FromGateway,
        ToStage,
        FromStage,
    ):
        for kind in get_args(union) or (union,):
            lines.append(f"{kind.__name__} {get_type_hints(kind)}")
    forms = (Parsing, ResponsesForm, GenerateForm)
    for part in (Sampling, Tensor, Image, Times, *forms, *get_args(Plan), Head):
        lines.append(f"{part.__name__} {get_type_hints(part)}")
    lines.append(f"{SAMPLING_ROW.format} {ROW.format} {PAIR.format}")
    lines.append(f"{list(FinishReason)} {list(Api)}")
    lines.append(f"{list(ToolFormat)} {list(ThoughtFormat)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
