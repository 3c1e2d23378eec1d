"""Scripts of a mock engine: which request gets which answer, and what each request was."""
