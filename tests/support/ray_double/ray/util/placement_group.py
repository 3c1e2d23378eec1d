"""Bundles of resources, all of which there are."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlacementGroup:
    """So many bundles."""

    num_bundles: int


def placement_group(bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
    """Make a group."""
    assert strategy in ("STRICT_PACK", "STRICT_SPREAD")
    return PlacementGroup(len(bundles))


removed: list[PlacementGroup] = []


def remove_placement_group(group: PlacementGroup) -> None:
    """Free what a group has."""
    removed.append(group)


def placement_group_table(group: PlacementGroup) -> dict[str, Any]:
    """Tell where the bundles of a group are."""
    places = dict.fromkeys(range(group.num_bundles), "here")
    return {"state": "CREATED", "bundles_to_node_id": places}
