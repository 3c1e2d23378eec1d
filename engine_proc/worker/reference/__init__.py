"""The decoder in plain torch."""
