"""The live state of the ring: `/ring` and `/ring/events`."""
