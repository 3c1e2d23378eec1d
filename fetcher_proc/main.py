"""Fetcher process: URLs of images in, their files out; nobody else connects to anywhere.
In: ToFetcher (tokenizer_proc).  Out: FromFetcher (tokenizer_proc)."""

import asyncio

from headrace.arena import Arena
from headrace.config import FetcherConfig
from headrace.fetcher_proc.download import Downloads
from headrace.fetcher_proc.fetches import Fetches
from headrace.fetcher_proc.replies import Replies
from headrace.media_domains import read_domain
from headrace.messages import ToFetcher
from headrace.process import Context
from headrace.sockets import Inbox, address

BEAT_S = 0.5


def main(config: FetcherConfig, context: Context) -> None:
    """Fetch images until SIGTERM."""
    asyncio.run(serve(config, context))


async def serve(config: FetcherConfig, context: Context) -> None:
    """Take what is asked for, and beat."""
    where = address(config.run_dir, "fetcher")
    inbox: Inbox[ToFetcher] = Inbox(where, ToFetcher, tee=context.tee)
    region = Arena(config.fetched_fd, 1).region(0)
    replies = Replies(config.run_dir, region, context.board)
    downloads = Downloads([read_domain(domain) for domain in config.allowed_domains])
    fetches = Fetches(downloads, replies, config.max_bytes, context.slot)
    inbox.attach(asyncio.get_running_loop(), lambda message, _: fetches.take(message))
    context.ready()
    while True:
        context.slot.beat()
        await asyncio.sleep(BEAT_S)
