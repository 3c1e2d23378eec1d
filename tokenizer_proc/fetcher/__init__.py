"""The fetcher: images that requests name by URLs."""
