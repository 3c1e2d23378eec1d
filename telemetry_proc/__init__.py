"""The telemetry process."""
