"""AWS::CDK::Metadata, which is nothing but a mark."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import TEXT, record


@provides
class Metadata(Provider):
    """The mark that the CDK leaves in a stack."""

    type = "AWS::CDK::Metadata"
    schema = record(Analytics=TEXT)

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        return str(uuid4())

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        """There is nothing to change."""

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        """There is nothing to remove."""
