"""What goes with a NAT gateway: its interface and the tie to its elastic address, which moto leaves behind."""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.nat_gateways import NatGateway, NatGatewayBackend

from trainlocal.cloud.services.amending import amend

_mark_deleted = NatGatewayBackend.delete_nat_gateway


def install() -> None:
    """Makes the deletion of a NAT gateway whole."""
    amend(EC2Backend, "delete_nat_gateway", _delete_nat_gateway)


def _delete_nat_gateway(backend: Any, nat_gateway_id: str) -> NatGateway:
    gateway = backend.nat_gateways.get(nat_gateway_id)
    if gateway is None:
        raise EC2ClientError("NatGatewayNotFound", f"The Nat Gateway {nat_gateway_id} was not found")
    for address in gateway.address_set:
        if address.get("associationId"):
            backend.disassociate_address(association_id=address["associationId"])
    backend.enis.pop(gateway._eni.id, None)
    return _mark_deleted(backend, nat_gateway_id)
