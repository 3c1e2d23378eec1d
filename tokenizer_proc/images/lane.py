"""The image processor and arena region of a tokenizer process that prepares images."""

import time
from collections.abc import Callable
from pathlib import Path

from headrace.board.admin_requests import RESET_MM_CACHE, AdminRequests
from headrace.board.replacements import ReplacementWatch
from headrace.config.model_card import read_json
from headrace.config.process_configs import TokenizerConfig
from headrace.ipc.arena import Arena
from headrace.ipc.fetcher_messages import FromFetcher
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.model.gguf import read_metadata
from headrace.model.mistral_tokenizer import ImageLimits, has_processor, read_image_limits
from headrace.model.mmproj import FolderConfig, read_mmproj
from headrace.runtime.process import Context
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.images.fetches import ImageFetches
from headrace.tokenizer_proc.images.image_tokens import spelling_of
from headrace.tokenizer_proc.images.images import Images
from headrace.tokenizer_proc.images.processor import (
    ImageProcessor,
    forgo_torch,
    made_processor,
    stored_processor,
)
from headrace.tokenizer_proc.images.store import ImageStore
from headrace.tokenizer_proc.jobs.aborts import Aborts

POLL_INTERVAL_S = 0.002  # between looks at what the engine is done with


def load_images(
    config: TokenizerConfig, context: Context, aborts: Aborts, encoder: Encoder
) -> Images:
    """Load the model's image processor and take over the region of this process.

    Raises:
        ModelError: the processor cannot be loaded.
    """
    forgo_torch()
    (card,) = config.cards  # images go with one model alone
    assert card.image_token is not None and config.arena_fd is not None
    processor = load_processor(Path(card.path), encoder, card.mmproj)
    arena = Arena(config.arena_fd, config.num_arena_regions)
    region = arena.region(context.index - config.num_tokenizers - 1)
    store = ImageStore(region)
    watch = ReplacementWatch(context.board, ("engine",))
    resets = AdminRequests(context.board, (RESET_MM_CACHE,))

    def look() -> None:
        if resets.take():
            store.forget()
        if watch.replaced():
            region.forget_sent()

    def wait() -> None:
        context.slot.beat()  # to wait for room is no work
        time.sleep(POLL_INTERVAL_S)
        look()

    return Images(
        processor,
        store,
        card.image_token,
        config.max_images,
        look=look,
        wait=wait,
        check=aborts.check,
        slot=context.slot,
        fetches=fetches_of(config, context),
        special_tokens=encoder.special_tokens,
    )


def fetches_of(config: TokenizerConfig, context: Context) -> ImageFetches | None:
    """Return the links to the fetcher and back; None where there is none."""
    if config.fetched_fd is None:
        return None
    index, run_dir = context.index, config.run_dir
    asks = Outbox(address(run_dir, "fetcher"), on_wait=context.slot.beat)
    answers: Inbox[FromFetcher] = Inbox(address(run_dir, "fetched", index), FromFetcher)
    return ImageFetches(index, asks, answers, Arena(config.fetched_fd, 1), context.board)


def load_processor(path: Path, encoder: Encoder, mmproj: str | None = None) -> ImageProcessor:
    """Load the image processor of a model's folder, or of a GGUF file with its projector file."""

    def token(id: int) -> str:
        (text,) = encoder.tokens([id])
        assert text is not None, f"{path}: the tokenizer has no token {id}"
        return text

    if mmproj is not None:
        made = read_mmproj(Path(mmproj), read_metadata(path)).folder
        spelling = spelling_of(made.config, made.settings, token)
        return ImageProcessor(made_processor(made), spelling)
    if not has_processor(path) and (limits := read_image_limits(path)) is not None:
        return mistral_processor(path, limits, token)
    settings = read_json(path / "processor_config.json", optional=True)
    spelling = spelling_of(read_json(path / "config.json"), settings, token)
    return ImageProcessor(stored_processor(path), spelling)


def mistral_processor(
    path: Path, limits: ImageLimits, token: Callable[[int], str]
) -> ImageProcessor:
    """Return the image processor of a folder whose `tekken.json` alone describes it."""
    side = limits.image_patch_size * limits.spatial_merge_size
    settings = {"size": {"longest_edge": limits.max_image_size}, "patch_size": side}
    written = {"patch_size": side}
    made = FolderConfig(
        read_json(path / "config.json"), "PixtralImageProcessorPil", settings, written
    )
    return ImageProcessor(made_processor(made), spelling_of(made.config, written, token))
