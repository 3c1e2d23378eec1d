"""`headrace bench`: load on any server with an OpenAI-compatible API, and what came of it."""
