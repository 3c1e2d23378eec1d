"""What the KV cache holds: pages, state slots, and their tables. Pure."""
