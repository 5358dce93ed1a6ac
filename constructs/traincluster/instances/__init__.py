"""The instance catalogue: what each EC2 instance type has, as data with sources."""

from traincluster.instances.catalogue import (
    Accelerator,
    InstanceType,
    efa_sizes,
    instance_type,
    instance_type_names,
    sources,
)

__all__ = ["Accelerator", "InstanceType", "efa_sizes", "instance_type", "instance_type_names", "sources"]
