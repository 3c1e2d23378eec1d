"""Requests into the engine and out of it: intake, leases, links to detokenizers, statistics."""
