"""Where EC2 offers an instance type: Availability Zones by id, as a snapshot.

Zone ids ("use1-az4") mean the same place in every account; zone names ("us-east-1b") do not. The snapshot is undated and
covers types with accelerators or EFA: it is good for a first choice, and the account is what counts.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any

SOURCE = "EC2 DescribeInstanceTypeOfferings as recorded in moto 5.2.5, undated"

_ZONE_ID = re.compile(r"[a-z]{2,5}\d+-az\d+")


def is_zone_id(zone: str) -> bool:
    """Whether a zone is named by its id, such as "use1-az4", rather than by its name in one account, such as "us-east-1b"."""
    return _ZONE_ID.fullmatch(zone) is not None


def offered_regions(instance_type: str) -> tuple[str, ...]:
    """The regions that offer the type; none when the snapshot does not know it."""
    return tuple(sorted(_data()["types"].get(instance_type, {})))


def offered_zones(instance_type: str, region: str) -> tuple[str, ...]:
    """The ids of a region's zones that offer the type; none when the snapshot does not know of any.

    Example:
        >>> offered_zones("p5en.48xlarge", "us-east-1")
        ('use1-az2', 'use1-az6')
    """
    digits = _data()["types"].get(instance_type, {}).get(region, "")
    return tuple(f"{_data()['regions'][region]}-az{digit}" for digit in digits)


@functools.lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("offerings.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
