"""Images: sources, limits, processors, the store."""
