"""Adapters (LoRA): their files, and what they add to each weight."""
