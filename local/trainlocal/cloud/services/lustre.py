"""FSx for Lustre: what CreateFileSystem refuses, mount names, and links with S3, none of which moto has."""

from __future__ import annotations

import json
import secrets
import string
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.ec2.models import ec2_backends
from moto.fsx.exceptions import FileSystemNotFound
from moto.fsx.models import FileSystem, FSxBackend
from moto.fsx.responses import FSxResponse
from moto.s3.models import s3_backends

from trainlocal.cloud.services.amending import amend

LNET_PORTS = ((988, 988), (1018, 1023))
THROUGHPUT = {
    ("PERSISTENT_1", "SSD"): (50, 100, 200),
    ("PERSISTENT_1", "HDD"): (12, 40),
    ("PERSISTENT_2", "SSD"): (125, 250, 500, 1000),
}
EFA_SERVER_GIB = {1000: 4800, 500: 9600, 250: 19200, 125: 38400}
MOST_LINKS = 8

_create_file_system, _delete_file_system = FSxBackend.create_file_system, FSxBackend.delete_file_system


def install() -> None:
    """Gives moto's FSx the checks and the actions."""
    amend(FSxBackend, "create_file_system", _create)
    amend(FSxBackend, "delete_file_system", _delete)
    amend(FSxResponse, "create_data_repository_association", _create_link)
    amend(FSxResponse, "describe_data_repository_associations", _describe_links)
    amend(FSxResponse, "delete_data_repository_association", _delete_link)


def links(backend: FSxBackend) -> dict[str, dict[str, Any]]:
    """The data repository associations of one region, by id."""
    made: dict[str, dict[str, Any]] = backend.__dict__.setdefault("links", {})
    return made


def _bad(message: str) -> JsonRESTError:
    return JsonRESTError("BadRequest", message)


def _create(backend: Any, **request: Any) -> FileSystem:
    if request["file_system_type"] == "LUSTRE":
        request["lustre_configuration"] = _checked(request)
        _check_network(backend, request)
        request["lustre_configuration"]["MountName"] = "".join(
            secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8)
        )
    return _create_file_system(backend, **request)


def _checked(request: dict[str, Any]) -> dict[str, Any]:
    """The Lustre configuration with FSx's defaults, once it is found to be one that FSx takes."""
    given = dict(request["lustre_configuration"] or {})
    kind = given.setdefault("DeploymentType", "SCRATCH_1")
    storage = request["storage_type"] or "SSD"
    if given.get("EfaEnabled") and (kind != "PERSISTENT_2" or "MetadataConfiguration" not in given):
        raise _bad("EFA is supported on PERSISTENT_2 file systems with a metadata configuration only.")
    if storage == "INTELLIGENT_TIERING":
        _check_tiering(kind, given, request["storage_capacity"])
    else:
        _check_provisioned(kind, storage, given, request["storage_capacity"])
    version = request["file_system_type_version"] or ("2.12" if kind == "PERSISTENT_2" else "2.10")
    if kind == "PERSISTENT_2" and version == "2.10":
        raise _bad("FileSystemTypeVersion 2.10 is not supported for PERSISTENT_2 file systems.")
    if "MetadataConfiguration" in given:
        _check_metadata(kind, given["MetadataConfiguration"])
    if request["kms_key_id"] and kind.startswith("SCRATCH"):
        raise _bad("KmsKeyId is not supported for SCRATCH file systems.")
    return given


def _check_provisioned(kind: str, storage: str, given: dict[str, Any], capacity: int | None) -> None:
    throughput = given.get("PerUnitStorageThroughput")
    if kind.startswith("SCRATCH"):
        if storage != "SSD":
            raise _bad(f"StorageType {storage} is not supported for deployment type {kind}.")
        if throughput is not None:
            raise _bad("PerUnitStorageThroughput is not supported for SCRATCH file systems.")
    else:
        allowed = THROUGHPUT.get((kind, storage))
        if allowed is None:
            raise _bad(f"StorageType {storage} is not supported for deployment type {kind}.")
        if throughput is None:
            raise _bad(f"Throughput must be specified for {kind} file systems.")
        if throughput not in allowed:
            raise _bad(f"PerUnitStorageThroughput {throughput} is invalid for {kind} {storage}. Valid values are {allowed}.")
    if ("DriveCacheType" in given) != (storage == "HDD"):
        raise _bad("DriveCacheType is required for HDD storage, and supported for it only.")
    if not _on_grid(kind, storage, throughput, capacity):
        raise _bad(f"The storage capacity {capacity} is invalid or does not meet the storage capacity requirement of {kind}.")
    if given.get("EfaEnabled") and capacity and capacity % EFA_SERVER_GIB.get(throughput or 0, 1):
        raise _bad(f"The storage capacity {capacity} is invalid for an EFA-enabled file system with this throughput.")


def _on_grid(kind: str, storage: str, throughput: int | None, capacity: int | None) -> bool:
    if not capacity or capacity < 0:
        return False
    if storage == "HDD":
        return capacity % (1800 if throughput == 40 else 6000) == 0
    step = 3600 if kind == "SCRATCH_1" else 2400
    return capacity in (1200, 2400) or capacity % step == 0


def _check_tiering(kind: str, given: dict[str, Any], capacity: int | None) -> None:
    throughput = given.get("ThroughputCapacity")
    if kind != "PERSISTENT_2":
        raise _bad("INTELLIGENT_TIERING is supported on PERSISTENT_2 file systems only.")
    if capacity is not None:
        raise _bad("StorageCapacity is not supported for INTELLIGENT_TIERING file systems.")
    if throughput is None or (throughput not in (1000, 2000) and throughput % 4000) or not 0 < throughput <= 2_000_000:
        raise _bad(f"ThroughputCapacity {throughput} is invalid. Valid values are 1000, 2000 and multiples of 4000.")
    if given.get("EfaEnabled") and throughput % 4000:
        raise _bad("EFA needs a ThroughputCapacity that is a multiple of 4000.")
    if "DataReadCacheConfiguration" not in given:
        raise _bad("DataReadCacheConfiguration is required for INTELLIGENT_TIERING file systems.")


def _check_metadata(kind: str, given: dict[str, Any]) -> None:
    if kind != "PERSISTENT_2":
        raise _bad("MetadataConfiguration is supported on PERSISTENT_2 file systems only.")
    iops = given.get("Iops")
    if (given.get("Mode") == "USER_PROVISIONED") != (iops is not None):
        raise _bad("Iops is required with the metadata mode USER_PROVISIONED, and supported with it only.")
    if iops is not None and iops not in (1500, 3000, 6000) and (iops % 12_000 or not 0 < iops <= 192_000):
        raise _bad(f"Metadata Iops {iops} is invalid.")


def _check_network(backend: FSxBackend, request: dict[str, Any]) -> None:
    """As FSx does: one subnet, and ports that are open at this moment within the file system's own group."""
    ec2 = ec2_backends[backend.account_id][backend.region_name]
    if len(request["subnet_ids"]) != 1:
        raise _bad("Exactly one subnet ID is supported for Lustre file systems.")
    subnet = ec2.get_subnet(request["subnet_ids"][0])
    groups = {name: ec2.get_security_group_from_id(name) for name in request["security_group_ids"] or []}
    for name, group in groups.items():
        if group is None or group.vpc_id != subnet.vpc_id:
            raise JsonRESTError("InvalidNetworkSettings", f"The security group {name} is not in the VPC of {subnet.id}.")
    needs_all = (request["lustre_configuration"] or {}).get("EfaEnabled")
    ports = [(None, None)] if needs_all else LNET_PORTS
    for first, last in ports:
        for way in ("ingress_rules", "egress_rules"):
            if not any(_lets_itself(group, getattr(group, way), first, last) for group in groups.values()):
                traffic = "all traffic" if first is None else f"Lustre LNET network traffic on port {first}"
                raise JsonRESTError(
                    "InvalidNetworkSettings",
                    "The file system cannot be created because the provided security groups do not permit "
                    f"{traffic} among themselves ({way.partition('_')[0]}).",
                )


def _lets_itself(group: Any, rules: list[Any], first: int | None, last: int | None) -> bool:
    for rule in rules:
        own = rule.source_group.get("GroupId") == group.id
        anyone = rule.ip_range.get("CidrIp") == "0.0.0.0/0"
        if rule.ip_protocol == "-1":
            if own or (anyone and first is not None):
                return True
        elif first is None or last is None or rule.ip_protocol not in ("tcp", "6") or not (own or anyone):
            continue
        elif int(rule.from_port) <= first and last <= int(rule.to_port):
            return True
    return False


def _delete(backend: FSxBackend, file_system_id: str, **request: Any) -> Any:
    answer = _delete_file_system(backend, file_system_id, **request)
    for identifier, link in list(links(backend).items()):
        if link["FileSystemId"] == file_system_id:
            del links(backend)[identifier]
    return answer


def _create_link(response: FSxResponse) -> str:
    request, backend = json.loads(response.body), response.fsx_backend
    file_system = backend.file_systems.get(request["FileSystemId"])
    if file_system is None:
        raise FileSystemNotFound(request["FileSystemId"])
    configuration = file_system.lustre_configuration or {}
    if configuration.get("DeploymentType") == "SCRATCH_1" or file_system.storage_type == "INTELLIGENT_TIERING":
        raise _bad("Data repository associations are not supported on this file system.")
    others = [link for link in links(backend).values() if link["FileSystemId"] == request["FileSystemId"]]
    if len(others) >= MOST_LINKS:
        raise JsonRESTError("ServiceLimitExceeded", f"A file system has at most {MOST_LINKS} data repository associations.")
    path = request.get("FileSystemPath") or "/"
    for other in others:
        one, two = (f"{each.rstrip('/')}/" for each in (path, other["FileSystemPath"]))
        if one.startswith(two) or two.startswith(one):
            raise _bad(f"FileSystemPath {path} overlaps with the association of {other['FileSystemPath']}.")
    bucket = request["DataRepositoryPath"].removeprefix("s3://").partition("/")[0]
    if bucket not in s3_backends[backend.account_id]["aws"].buckets:
        raise _bad(f"The bucket {bucket} does not exist or cannot be accessed.")
    identifier = f"dra-{secrets.token_hex(8)}"
    arn = f"arn:aws:fsx:{backend.region_name}:{backend.account_id}:association/{file_system.file_system_id}/{identifier}"
    kept = ("DataRepositoryPath", "BatchImportMetaDataOnCreate", "ImportedFileChunkSize", "S3")
    link = {
        "AssociationId": identifier,
        "ResourceARN": arn,
        "FileSystemId": file_system.file_system_id,
        "FileSystemPath": path,
        "Lifecycle": "AVAILABLE",
        "Tags": request.get("Tags") or [],
        **{name: request[name] for name in kept if name in request},
    }
    links(backend)[identifier] = link
    return json.dumps({"Association": link})


def _describe_links(response: FSxResponse) -> str:
    request = json.loads(response.body)
    wanted = request.get("AssociationIds") or list(links(response.fsx_backend))
    return json.dumps({"Associations": [_link(response, identifier) for identifier in wanted]})


def _delete_link(response: FSxResponse) -> str:
    request = json.loads(response.body)
    _link(response, request["AssociationId"])
    del links(response.fsx_backend)[request["AssociationId"]]
    return json.dumps({"AssociationId": request["AssociationId"], "Lifecycle": "DELETING"})


def _link(response: FSxResponse, identifier: str) -> dict[str, Any]:
    found = links(response.fsx_backend).get(identifier)
    if found is None:
        raise JsonRESTError("DataRepositoryAssociationNotFound", f"The data repository association {identifier} does not exist.")
    return found
