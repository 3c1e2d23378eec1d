"""Vision workers: what becomes of an image before the decoder sees it."""
