"""Admission: keys, limits, the pace of long bodies."""
