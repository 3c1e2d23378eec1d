"""Pipeline stages on other machines: the seat of a stage's worker, and the process that has it."""
