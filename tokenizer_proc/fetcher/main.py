"""Fetcher process: URLs of images in, their files out; no other process connects outward.
In: ToFetcher (tokenizer_proc).  Out: FromFetcher (tokenizer_proc)."""

import asyncio

from headrace.config.media_domains import read_domain
from headrace.config.process_configs import FetcherConfig
from headrace.ipc.arena import Arena
from headrace.ipc.fetcher_messages import ToFetcher
from headrace.ipc.sockets import Inbox, address
from headrace.runtime.process import Context
from headrace.tokenizer_proc.fetcher.download import Downloads
from headrace.tokenizer_proc.fetcher.fetches import Fetches
from headrace.tokenizer_proc.fetcher.result_sender import FetchResultSender

BEAT_S = 0.5


def main(config: FetcherConfig, context: Context) -> None:
    """Fetch images until SIGTERM."""
    asyncio.run(serve(config, context))


async def serve(config: FetcherConfig, context: Context) -> None:
    """Handle requests, and send heartbeats."""
    where = address(config.run_dir, "fetcher")
    inbox: Inbox[ToFetcher] = Inbox(where, ToFetcher, tee=context.tee)
    region = Arena(config.fetched_fd, 1).region(0)
    results = FetchResultSender(config.run_dir, region, context.board)
    downloads = Downloads([read_domain(domain) for domain in config.allowed_domains])
    fetches = Fetches(downloads, results, config.max_bytes, context.slot)
    inbox.attach(asyncio.get_running_loop(), lambda message, _: fetches.take(message))
    context.ready()
    while True:
        context.slot.beat()
        await asyncio.sleep(BEAT_S)
