"""The user data of a node: one bash script with the RunSpec, the payload or its whereabouts, and the bootstrap.

EC2 takes 16,384 raw bytes, counted after CloudFormation has put names in place of references. Those names are not
known at synth; each reference is counted at the length of the longest name that can stand there.
"""

from __future__ import annotations

import base64
import re
import shlex
import tempfile
from importlib import resources
from pathlib import Path

from aws_cdk import Annotations
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3_assets as s3_assets

from constructs import Construct
from traincluster.payload import Payload
from traincluster.permissions import grant_read
from traincluster.rules.engine import check
from traincluster.rules.report import report
from traincluster.rules.user_data import LIMIT_BYTES, UserDataFacts
from trainrun.spec import RunSpec

REFERENCE_BYTES = 400
"""The most that one reference can become. The longest is a log group's name that CloudFormation makes: a stack name of up
to 128 characters, a logical id of up to 255, and a suffix. Bucket names have at most 63, regions fewer."""

READINESS_URL_BYTES = 1000
"""The most that the presigned URL of a wait condition's handle can become: it names the stack, and is signed."""

_REFERENCE = re.compile(r"\$\{Token\[[A-Za-z0-9:._-]+\]\}")
"""How the CDK writes a reference into text until the template is made. Nothing in it means anything to a shell."""

# S3 may refuse a new node for some seconds, until its role is known everywhere and its routes carry traffic.
_S3_FETCH = r"""
payload_archive() {
  local pause
  for pause in 1 2 4 8 16 32 ""; do
    "$python" - "$payload_region" "$payload_bucket" "$payload_key" "$1" <<'PYTHON' && return
import sys

try:
    import boto3
    from botocore.config import Config
except ImportError as error:
    print(f"traincluster: {sys.executable} has no boto3, by which the payload is fetched: {error}", file=sys.stderr)
    sys.exit(3)

region, bucket, key, target = sys.argv[1:]
try:
    s3 = boto3.client("s3", region_name=region, config=Config(connect_timeout=5, read_timeout=60))
    s3.download_file(bucket, key, target)
except Exception as error:
    sys.exit(f"traincluster: s3://{bucket}/{key}: {error}")
PYTHON
    [ "$?" -ne 3 ] || return 1
    [ -z "$pause" ] || sleep "$pause"
  done
  return 1
}
"""


def render(spec: RunSpec, payload: Payload, *, bucket: str | None = None, key: str | None = None) -> str:
    """The document, which may hold unresolved references.

    Args:
        spec: what the node has to know.
        payload: the code that runs; its digest is baked in.
        bucket: bucket to fetch the payload from; None puts the payload itself into the document.
        key: its key there.
    """
    assert (bucket is None) == (key is None)
    assert spec.payload_sha256 == payload.sha256
    if bucket is None or key is None:
        source = _inline(payload)
    else:
        place = {"payload_region": spec.region, "payload_bucket": bucket, "payload_key": key}
        source = "\n".join([*(f"{name}={_quote(value)}" for name, value in place.items()), _S3_FETCH.strip()])
    return "\n".join(
        [
            "#!/bin/bash",
            f"image_python={_quote(spec.job.python)}",
            f"payload_sha256={payload.sha256}",
            f"run_json() {{\n  cat <<'RUN_JSON'\n{spec.to_json()}\nRUN_JSON\n}}",
            source,
            _bootstrap(),
        ]
    )


def most_bytes(document: str) -> int:
    """The document's size in bytes once its references are names, at most."""
    text, references = _REFERENCE.subn("", document)
    return len(text.encode()) + REFERENCE_BYTES * references


def place_user_data(scope: Construct, spec: RunSpec, payload: Payload, *, reader: iam.IGrantable) -> str:
    """The document for a launch template: with the payload in it if that fits, else with the payload as an asset on S3.

    Which of the two it is, is told as an annotation at synth. A document that does not fit even without the payload is a
    finding of the rules.

    Args:
        scope: where the asset goes.
        spec: what the node has to know.
        payload: the code that runs.
        reader: who reads the asset.
    """
    inline = render(spec, payload)
    url = READINESS_URL_BYTES - REFERENCE_BYTES if spec.readiness.url else 0
    size = most_bytes(inline) + url
    if size <= LIMIT_BYTES:
        _tell(scope, f"The payload travels inside the user data, which is {size:,} of at most {LIMIT_BYTES:,} bytes long.")
        return inline
    asset = _asset(scope, payload)
    grant_read(reader, asset.bucket, asset.s3_object_key)
    document = render(spec, payload, bucket=asset.s3_bucket_name, key=asset.s3_object_key)
    report(scope, check(UserDataFacts(most_bytes=most_bytes(document) + url)))
    _tell(
        scope,
        f"The payload ({len(payload.archive):,} bytes) is an asset on S3: with it the user data would be {size:,} bytes long, "
        f"and EC2 takes {LIMIT_BYTES:,}.",
    )
    return document


def _asset(scope: Construct, payload: Payload) -> s3_assets.Asset:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "payload.tar.xz")
        archive.write_bytes(payload.archive)
        return s3_assets.Asset(scope, "Payload", path=str(archive))  # copied into the cloud assembly at once


def _tell(scope: Construct, text: str) -> None:
    Annotations.of(scope).add_info_v2("traincluster:payload", text)


def _inline(payload: Payload) -> str:
    text = base64.b64encode(payload.archive).decode()
    return f"payload_archive() {{\n  base64 -d >\"$1\" <<'ARCHIVE'\n{text}\nARCHIVE\n}}"


def _bootstrap() -> str:
    """The script less its comments: each byte of the document counts."""
    text = resources.files(__package__).joinpath("bootstrap.sh").read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if line and not line.lstrip().startswith("#")) + "\n"


def _quote(text: str) -> str:
    """Quoted for bash. A reference counts as plain text: the names that replace it need no quoting."""
    return f"'{text}'" if _REFERENCE.fullmatch(text) else shlex.quote(text)
