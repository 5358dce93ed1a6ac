"""Pins of images: what `traincluster pin-image` writes into the CDK's context file and a synth reads there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traincluster.image import PINS_CONTEXT, NodeImage, pins_of


def look_up_image(parameter: str, *, region: str) -> str:
    """The image that an SSM parameter names now, by the account's credentials.

    Raises:
        ValueError: no such parameter, no credentials, or no boto3.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ValueError("boto3 is needed to ask AWS for the image. Install it (pip install boto3), or give --ami.") from None
    try:
        found = boto3.client("ssm", region_name=region).get_parameter(Name=parameter)
    except (BotoCoreError, ClientError) as error:
        raise ValueError(f"The image of {parameter!r} in {region} cannot be looked up: {error}") from None
    return str(found["Parameter"]["Value"])


def pin(file: Path, *, region: str, parameter: str, ami: str) -> str | None:
    """Write a pin and leave the rest of the file as it is. Returns the image that was pinned before.

    Raises:
        ValueError: the file cannot be read, or what is to be pinned is no image.
    """
    if NodeImage(ami=ami).is_parameter or not NodeImage(ami=parameter).is_parameter:
        raise ValueError(f"{ami!r} cannot be pinned as the image of {parameter!r}. Pin the id of an image for an SSM parameter.")
    context = _read(file)
    before = pins_of(context.get(PINS_CONTEXT), parameter).get(region)
    context.setdefault(PINS_CONTEXT, {}).setdefault(region, {})[parameter] = ami
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(context, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(file)
    return before


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        context = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The context file {str(file)!r} cannot be read: {error}.") from None
    if not isinstance(context, dict):
        raise ValueError(f"The context file {str(file)!r} holds {context!r} where an object is expected.")
    return context
