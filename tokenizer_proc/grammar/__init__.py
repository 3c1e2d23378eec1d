"""Grammars of structured output and tool calls."""
