"""Container repositories."""

from __future__ import annotations

import json
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides, undone_on_error
from trainlocal.cloud.resources.schema import DOCUMENT, FLAG, TAGS, TEXT, record


@provides
class Repository(Provider):
    """A repository of container images."""

    type = "AWS::ECR::Repository"
    schema = record(
        EmptyOnDelete=FLAG,
        ImageScanningConfiguration=record(ScanOnPush=FLAG),
        ImageTagMutability=TEXT,
        LifecyclePolicy=record(LifecyclePolicyText=TEXT),
        RepositoryName=TEXT,
        RepositoryPolicyText=DOCUMENT,
        Tags=TAGS,
    )
    replacing = frozenset({"RepositoryName"})
    attributes = frozenset({"Arn", "RepositoryUri"})
    name_property = "RepositoryName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        client = place.client("ecr")
        name: str = properties.get("RepositoryName") or place.name(lower=True)
        client.create_repository(repositoryName=name)
        with undone_on_error(lambda: client.delete_repository(repositoryName=name, force=True)):
            self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("ecr")
        mutability = properties.get("ImageTagMutability", "MUTABLE")
        client.put_image_tag_mutability(repositoryName=physical_id, imageTagMutability=mutability)
        scan = properties.get("ImageScanningConfiguration", {}).get("ScanOnPush", False)
        client.put_image_scanning_configuration(repositoryName=physical_id, imageScanningConfiguration={"scanOnPush": scan})
        if "LifecyclePolicy" in properties:
            text = properties["LifecyclePolicy"]["LifecyclePolicyText"]
            client.put_lifecycle_policy(repositoryName=physical_id, lifecyclePolicyText=text)
        elif "LifecyclePolicy" in before:
            client.delete_lifecycle_policy(repositoryName=physical_id)
        if "RepositoryPolicyText" in properties:
            text = json.dumps(properties["RepositoryPolicyText"])
            client.set_repository_policy(repositoryName=physical_id, policyText=text)
        elif "RepositoryPolicyText" in before:
            client.delete_repository_policy(repositoryName=physical_id)
        self._tag(place, physical_id, properties)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("ecr").delete_repository(repositoryName=physical_id, force=properties.get("EmptyOnDelete", False))

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        found = place.client("ecr").describe_repositories(repositoryNames=[physical_id])["repositories"][0]
        return found["repositoryArn" if name == "Arn" else "repositoryUri"]

    def _tag(self, place: Place, name: str, properties: dict[str, Any]) -> None:
        client = place.client("ecr")
        arn = place.arn("ecr", f"repository/{name}")
        wanted = place.tags(properties)
        stale = [tag["Key"] for tag in client.list_tags_for_resource(resourceArn=arn)["tags"] if tag["Key"] not in wanted]
        if stale:
            client.untag_resource(resourceArn=arn, tagKeys=stale)
        if wanted:
            client.tag_resource(resourceArn=arn, tags=[{"Key": key, "Value": value} for key, value in wanted.items()])
