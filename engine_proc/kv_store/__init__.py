"""The KV store: pages and states beneath the pool, in memory and on disk."""
