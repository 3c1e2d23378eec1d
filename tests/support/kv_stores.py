"""What tests do with a KV store in their own process."""

import os

from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.kv_store.kv_store import KvStore
from headrace.ipc.worker_messages import FetchRecords, Lookup
from headrace.storage.store_directory import StoreDirectory


def answer_all(fetcher: PageFetcher, store: KvStore) -> None:
    """Answer what a fetcher asks until it asks nothing."""
    message = fetcher.ask()
    while message is not None:
        assert isinstance(message, Lookup | FetchRecords)
        act = store.look if isinstance(message, Lookup) else store.fetch
        message = fetcher.ask(act(message))  # type: ignore[arg-type]


def close_files(directory: StoreDirectory) -> None:
    """Close the files of a store, as its death does."""
    readers = directory._readers.values()
    for fd in (*directory._fds.values(), *(reader._fd for reader in readers)):
        os.close(fd)
