"""Where actors go."""

from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class PlacementGroupSchedulingStrategy:
    """Into a bundle of a group."""

    group: PlacementGroup
    bundle: int
