"""Schemas taken from botocore's description of an API, for properties that CloudFormation names as the API does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel

from trainlocal.cloud.resources.schema import FLAG, NUMBER, TEXT, WHOLE, Kind, Many, Named, Record

_SCALARS: dict[str, Kind] = {"boolean": FLAG, "integer": WHOLE, "long": WHOLE, "float": NUMBER, "double": NUMBER}


@lru_cache
def api_shape(service: str, shape: str) -> Record:
    """The structure ``shape`` of a service's API as a schema.

    Nothing in it is required: the shapes of launch templates leave everything to the launch.
    """
    model = ServiceModel(Loader().load_service_model(service, "service-2"))
    made = _schema(model.shape_for(shape))
    assert isinstance(made, Record)
    return made


def _schema(shape: Any) -> Kind:
    if shape.type_name == "structure":
        return Record({name: _schema(member) for name, member in shape.members.items()})
    if shape.type_name == "list":
        return Many(_schema(shape.member))
    if shape.type_name == "map":
        return Named(_schema(shape.value))
    return _SCALARS.get(shape.type_name, TEXT)


class ApiShape(Kind):
    """A schema that is read from botocore when it is first needed: the description of EC2 is large."""

    def __init__(self, service: str, shape: str) -> None:
        self._names = (service, shape)

    def faults(self, node: Any, path: str) -> Any:
        return api_shape(*self._names).faults(node, path)

    def convert(self, value: Any, path: str) -> Any:
        return api_shape(*self._names).convert(value, path)
