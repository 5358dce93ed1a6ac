"""What each EC2 instance type has: the typed reader of catalogue.json.

The data is made by ``regenerate.py`` from what EC2's DescribeInstanceTypes answers and from curated facts about
accelerated types. Each record names its sources, and in its notes what those sources disagree about.
"""

from __future__ import annotations

import difflib
import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Purchase = Literal["on-demand", "spot", "capacity-block"]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The accelerators of one instance."""

    kind: Literal["nvidia", "neuron", "other"]
    """Whose driver and runtime they take: NVIDIA's, AWS Neuron's, or neither (which trainrun cannot drive)."""
    name: str
    count: int
    """Devices on the instance; a type with a fraction of a GPU counts as 1."""
    memory_gib: float
    """Memory of one device in GiB; 0 where no source gives it."""
    processes: int
    """Training processes per device: 1 per GPU, one per Neuron core that the runtime shows."""


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One instance type.

    Example:
        >>> instance_type("p5.48xlarge").max_efa_interfaces
        32
    """

    name: str
    arch: Literal["x86_64", "arm64"]
    vcpus: int
    memory_gib: float
    interfaces_per_card: tuple[int, ...]
    """For each network card, how many interfaces it takes. A device index must be below it."""
    efa_cards: tuple[int, ...] = ()
    """Indices of the network cards that take one EFA interface each."""
    cluster_placement: bool = False
    """Whether a cluster placement group takes the type."""
    purchase: tuple[Purchase, ...] = ()
    """How EC2 sells it. A reservation is on-demand capacity."""
    accelerator: Accelerator | None = None
    pytorch_image_listed: bool = False
    """Whether AWS lists the type among those that its PyTorch deep-learning image supports."""
    burstable: bool = False
    bare_metal: bool = False
    local_disks: int = 0
    """Disks of the instance store; 0 also where no source tells their number."""
    nitro_version: int | None = None
    """Version of the Nitro cards, for accelerated types; None where no source gives it, as for all other types."""
    xen: bool = False
    """Whether the type is of the generations before Nitro, whose disks are not NVMe devices."""
    sources: tuple[str, ...] = ()
    """Where the record comes from: keys of ``sources()``."""
    notes: tuple[str, ...] = ()
    """What the sources disagree about, or leave open."""

    @property
    def network_cards(self) -> int:
        return len(self.interfaces_per_card)

    @property
    def max_efa_interfaces(self) -> int:
        """One EFA interface per card that takes it."""
        return len(self.efa_cards)

    @property
    def efa_on_card_0(self) -> bool:
        """False on p6-b300, whose card 0 carries ordinary traffic alone."""
        return 0 in self.efa_cards

    @property
    def training_processes(self) -> int:
        """Ranks that torchrun starts on one node: one per accelerator or Neuron core, one on a CPU node."""
        return self.accelerator.count * self.accelerator.processes if self.accelerator else 1


def instance_type(name: str) -> InstanceType:
    """The catalogue's record of an instance type.

    Raises:
        ValueError: the catalogue has no such type; the message names the nearest ones.
    """
    records = _data()["types"]
    if name not in records:
        raise ValueError(f"Instance type {name!r} is not in the catalogue. {_near(name, records)}")
    return _read(name, records[name])


def instance_type_names() -> tuple[str, ...]:
    """All types of the catalogue, sorted."""
    return tuple(sorted(_data()["types"]))


def efa_sizes(family: str) -> tuple[str, ...]:
    """The types of a family ("p5", "c5n") that have EFA, smallest first."""
    types = [instance_type(name) for name in instance_type_names() if name.partition(".")[0] == family]
    return tuple(t.name for t in sorted(types, key=lambda t: t.vcpus) if t.efa_cards)


def sources() -> dict[str, str]:
    """What the keys in ``InstanceType.sources`` stand for."""
    return dict(_data()["sources"])


@functools.lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("catalogue.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _near(name: str, records: dict[str, Any]) -> str:
    family = name.partition(".")[0]
    siblings = [known for known in sorted(records) if known.partition(".")[0] == family]
    near = difflib.get_close_matches(name, siblings or records, n=3, cutoff=0.5) or siblings[:3]
    if not near:
        return "Give the full name of an EC2 instance type, for example 'p5.48xlarge' or 'c7i.2xlarge'."
    return f"Did you mean {', '.join(near[:-1]) + ' or ' + near[-1] if len(near) > 1 else near[0]}?"


def _read(name: str, record: dict[str, Any]) -> InstanceType:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    per_card = record["interfaces_per_card"]
    if isinstance(per_card, dict):
        values["interfaces_per_card"] = (per_card["each"],) * per_card["cards"]
    if "accelerator" in record:
        values["accelerator"] = Accelerator(**record["accelerator"])
    return InstanceType(name=name, **values)
