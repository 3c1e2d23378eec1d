"""The bases of the structs of responses."""

import msgspec


class Whole(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A struct that has all fields there are."""


class Typed(Whole, tag_field="type"):
    """One of several structs, distinguished by their `type`."""
