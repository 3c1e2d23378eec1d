"""The process in the seat of an engine that runs on another machine."""
