"""The embedded `Engine`: the ring without HTTP."""
