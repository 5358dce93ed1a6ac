"""The instance catalogue: what each EC2 instance type has and where it is offered, as data with sources."""

from traincluster.instances.catalogue import (
    Accelerator,
    InstanceType,
    efa_sizes,
    instance_type,
    instance_type_names,
    sources,
)
from traincluster.instances.offerings import is_zone_id, offered_regions, offered_zones

__all__ = [
    "Accelerator",
    "InstanceType",
    "efa_sizes",
    "instance_type",
    "instance_type_names",
    "is_zone_id",
    "offered_regions",
    "offered_zones",
    "sources",
]
