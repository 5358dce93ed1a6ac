"""Make catalogue.json, the data of the instance catalogue, and offerings.json, which says where types are offered.

    python constructs/traincluster/instances/regenerate.py --facts instances.json

``--facts`` is a curated file of accelerated types (one record a type, with sources and notes on what AWS's own
pages disagree about). Every other type comes from what moto has recorded of EC2's DescribeInstanceTypes. Where both
have a type, the curated record wins. The output is sorted and has one type a line, so that a refresh reads as a diff.
Offerings are moto's recording of DescribeInstanceTypeOfferings, kept for types with accelerators or EFA.
"""

from __future__ import annotations

import argparse
import gzip
import json
from importlib import metadata, resources
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).with_name("catalogue.json")
OFFERINGS = Path(__file__).with_name("offerings.json")

ACCELERATOR_KINDS = {"NVIDIA": "nvidia", "AWS": "neuron"}

# Neuron cores that the runtime shows, and so processes, per device: torchrun starts 32 on a trn1.32xlarge and, with
# logical cores of two (the default of Trainium2), 64 on a trn2.48xlarge. Source: AWS Neuron documentation.
NEURON_PROCESSES = {"Inferentia": 4, "Inferentia2": 2, "Trainium": 2, "Trainium2": 4}

SOURCES = {
    "moto": f"EC2 DescribeInstanceTypes as recorded in moto {metadata.version('moto')}",
    "ec2doc": "docs.aws.amazon.com/ec2/latest/instancetypes/ac.html and pg.html",
    "efadoc": "docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html and efa-acc-inst-types.html",
    "karpenter": "github.com/aws/karpenter-provider-aws, generated instance data",
}

Record = dict[str, Any]


def from_describe_instance_types(described: Record) -> Record:
    """One type as EC2's API describes it."""
    network = described["NetworkInfo"]
    cards = network["NetworkCards"]
    efa_cards = [card["NetworkCardIndex"] for card in cards if "efa-only" in card.get("InterfaceTypes", [])]
    most = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    architectures = described["ProcessorInfo"]["SupportedArchitectures"]
    return {
        "arch": "arm64" if "arm64" in architectures else "x86_64",
        "vcpus": described["VCpuInfo"]["DefaultVCpus"],
        "memory_gib": round(described["MemoryInfo"]["SizeInMiB"] / 1024, 2),
        "interfaces_per_card": [card["MaximumNetworkInterfaces"] for card in cards],
        "efa_cards": efa_cards[:most],
        "cluster_placement": "cluster" in described.get("PlacementGroupInfo", {}).get("SupportedStrategies", []),
        "purchase": described["SupportedUsageClasses"],
        "burstable": described["BurstablePerformanceSupported"],
        "bare_metal": described["BareMetal"],
        "local_disks": sum(disk["Count"] for disk in described.get("InstanceStorageInfo", {}).get("Disks", [])),
        "xen": described.get("Hypervisor") == "xen",
        "sources": ["moto"],
    }


def from_facts(fact: Record) -> Record:
    """One curated type."""
    network, efa = fact["network"], fact["efa"]
    purchase = [name for name, offered in (("on-demand", fact["on_demand"]), ("spot", fact["spot"])) if offered]
    return {
        "arch": fact["arch"],
        "vcpus": fact["vcpu"],
        "memory_gib": fact["memory_gib"],
        # The facts name the limit once, for all cards alike. It is unrecorded for p6e-gb200 alone, whose documented
        # layout puts one interface on a card.
        "interfaces_per_card": (network["enis_per_card"] or [1]) * network["cards"],
        "efa_cards": efa["efa_cards"] if efa["supported"] else [],
        "cluster_placement": bool(fact["cluster_placement_group"]),
        "purchase": purchase + (["capacity-block"] if fact["capacity_block"] else []),
        "accelerator": _accelerator(fact["accelerator"]),
        "pytorch_image_listed": any(name in (fact["dlami"] or []) for name in ("pytorch-x86", "arm64")),
        "nitro_version": fact["nitro_version"],
        "local_disks": sum(count for count, _ in (fact["local_nvme"] or {}).get("disks") or ()),
        "sources": fact["sources"],
        "notes": fact["notes"],
    }


def _accelerator(fact: Record) -> Record:
    kind = ACCELERATOR_KINDS.get(fact["manufacturer"], "other")
    # A type with a fraction of a GPU is recorded with count 0; a process still has one device before it.
    return {
        "kind": kind,
        "name": fact["name"],
        "count": fact["count"] or 1,
        "memory_gib": fact["memory_gib_each"] or 0.0,
        "processes": NEURON_PROCESSES[fact["name"]] if kind == "neuron" else 1,
    }


def compact(record: Record) -> Record:
    """The record without what equals the reader's defaults; equal numbers on all cards as one number and a count."""
    per_card = record["interfaces_per_card"]
    kept = {key: value for key, value in record.items() if value not in (False, 0, [], None)}
    if len(set(per_card)) == 1:
        kept["interfaces_per_card"] = {"cards": len(per_card), "each": per_card[0]}
    return kept


def offerings(types: set[str]) -> Record:
    """Region -> what its zone ids begin with, and type -> region -> the digits that its zones' ids end with."""
    regions: dict[str, str] = {}
    zones: dict[str, dict[str, list[str]]] = {}
    folder = resources.files("moto").joinpath("ec2/resources/instance_type_offerings/availability-zone-id")
    for file in folder.iterdir():
        region = file.name.partition(".")[0]
        for offer in json.loads(gzip.decompress(file.read_bytes())):
            regions[region], _, digit = offer["Location"].partition("-az")
            assert len(digit) == 1, offer
            if offer["InstanceType"] in types:
                zones.setdefault(offer["InstanceType"], {}).setdefault(region, []).append(digit)
    return {
        "regions": dict(sorted(regions.items())),
        "types": {
            name: {region: "".join(sorted(digits)) for region, digits in sorted(zones[name].items())} for name in sorted(zones)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=Path, required=True, help="curated file of accelerated types")
    parser.add_argument("--out", type=Path, default=CATALOGUE, help="file to write (default: beside this script)")
    arguments = parser.parse_args()

    with resources.files("moto").joinpath("ec2/resources/instance_types.json.gz").open("rb") as packed:
        described = json.loads(gzip.decompress(packed.read()))
    # A Mac type runs on a dedicated host with macOS: never a node.
    types = {name: from_describe_instance_types(one) for name, one in described.items() if not name.startswith("mac")}
    facts = json.loads(arguments.facts.read_text())["instance_types"]
    for name, fact in facts.items():
        types[name] = {**types.get(name, {}), **from_facts(fact)}

    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(compact(types[name]))}" for name in sorted(types))
    arguments.out.write_text(f'{{"sources": {json.dumps(SOURCES, indent=1)},\n"types": {{\n{lines}\n}}}}\n')
    print(f"{arguments.out}: {len(types)} types, {len(facts)} of them curated.")
    offered = offerings({name for name, record in types.items() if record.get("accelerator") or record.get("efa_cards")})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(where)}" for name, where in offered["types"].items())
    OFFERINGS.write_text(f'{{"regions": {json.dumps(offered["regions"], indent=1)},\n"types": {{\n{lines}\n}}}}\n')
    print(f"{OFFERINGS}: {len(offered['types'])} types.")


if __name__ == "__main__":
    main()
