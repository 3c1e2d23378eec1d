"""Text to token ids: chat templates, encoders."""
