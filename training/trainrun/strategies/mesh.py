"""The ranks by what they share: replicas of the model, shards of one replica, or the products of each of its matrices."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainrun.config import ConfigError
from trainrun.ranks import Ranks, require_group
from trainrun.words import counted


def mesh_of(ranks: Ranks, *, shard_size: int) -> DeviceMesh:
    """All ranks, by "replicate" (outermost; only if there are several replicas), "shard", and "tensor" (only if split so).

    Args:
        shard_size: data ranks that have one copy of the model between them; 0 for all.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    require_group(ranks.device)
    size = shard_size or ranks.data_size
    if ranks.data_size % size:
        allowed = ", ".join(str(n) for n in range(1, min(ranks.data_size, 1024) + 1) if ranks.data_size % n == 0)
        raise ConfigError(
            [
                f"sharding.shard_size is {size}, which does not divide {counted(ranks.data_size, 'rank')}. "
                f"Allowed: 0 (all), {allowed}."
            ]
        )
    sizes = {"replicate": ranks.data_size // size, "shard": size, "tensor": ranks.tensor_parallel}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(ranks.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of ``mesh`` over which ranks have different data."""
    assert mesh.mesh_dim_names is not None
    return mesh[tuple(name for name in mesh.mesh_dim_names if name != "tensor")]
