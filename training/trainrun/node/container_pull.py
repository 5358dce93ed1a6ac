"""Pulling the job's container image."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.built_environment import said, tried
from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.substeps import Done
from trainrun.spec import EcrImage, ecr_image, is_pinned

LOGIN_SECONDS = 60.0
_FINAL = re.compile(
    r"manifest unknown|not found|denied|unauthorized|authentication required|no basic auth|invalid reference|"
    r"no matching manifest|no space left",
    re.IGNORECASE,
)
"""What another attempt would be told again."""

Password = Callable[[EcrImage], str]


def pull(container: str, *, engine: str, folder: Path, run: Run, password: Password | None = None) -> Done:
    """Have an image. One that is named by its digest is not pulled again; a tag is, since it may have moved.

    Args:
        container: its reference.
        engine: docker or podman.
        folder: where the engine keeps credentials while it pulls; removed after that.
        run: runs the engine.
        password: asks ECR for one.

    Raises:
        StepFailed: it could not be pulled and is not there; with what to look at.
    """
    here = _digests(container, engine=engine, run=run)
    if here is not None and is_pinned(container):
        return Done(f"{container} was there")
    # Both engines' own names for the file with credentials; the agent's own HOME may not exist.
    environment = {
        "HOME": str(folder),
        **os.environ,
        "DOCKER_CONFIG": str(folder),
        "REGISTRY_AUTH_FILE": str(folder / "auth.json"),
    }

    def pull_once() -> None:
        said([engine, "pull", "--quiet", container], environment=environment)

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ecr := ecr_image(container):
            _log_in(ecr, engine=engine, environment=environment, password=password or _ask_ecr)
        tried(pull_once, final=lambda text: bool(_FINAL.search(text)))
    except StepFailed as failure:
        if here is not None:
            return Done(f"{container} was there ({here}), and may not be the newest: {failure}")
        raise StepFailed(f"{container} could not be pulled. {failure}\n{_advice(container, str(failure))}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Done(f"{container} ({_digests(container, engine=engine, run=run)})", changed=True)


def _digests(container: str, *, engine: str, run: Run) -> str | None:
    """The digests by which registries know the image that is here; None when it is not here."""
    try:
        text = run(engine, "image", "inspect", "--format={{range .RepoDigests}}{{.}} {{end}}", container)
    except StepFailed:
        return None
    return ", ".join(sorted({each.partition("@")[2] for each in text.split() if "@" in each})) or "of this node only"


def _log_in(ecr: EcrImage, *, engine: str, environment: dict[str, str], password: Password) -> None:
    """Log in to ECR. The password is good for twelve hours and goes through a pipe.

    Raises:
        StepFailed: ECR gave none, or the registry did not take it.
    """
    done = subprocess.run(
        [engine, "login", "--username", "AWS", "--password-stdin", ecr.registry],
        input=password(ecr),
        env=environment,
        capture_output=True,
        text=True,
        timeout=LOGIN_SECONDS,
        check=False,
    )
    if done.returncode:
        raise StepFailed(f"{ecr.registry} did not let the node log in: {' '.join(done.stderr.split())[-300:]}.")


def _ask_ecr(ecr: EcrImage) -> str:
    client = boto3.client(
        "ecr", region_name=ecr.region, config=Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 5})
    )
    try:
        token = client.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    except (BotoCoreError, ClientError) as error:
        raise StepFailed(f"ECR in {ecr.region} gave no password: {error}.") from None
    return base64.b64decode(token).decode().partition(":")[2]


def _advice(container: str, failure: str) -> str:
    if re.search(r"no space left", failure, re.IGNORECASE):
        return "The node's disk is full: raise root_volume_gib, or set instance_store, where Docker then keeps images."
    ecr = ecr_image(container)
    if ecr and re.search(r"denied|unauthorized|not authorized|no basic auth|log in|password", failure, re.IGNORECASE):
        return (
            f"May the nodes' role pull from {ecr.repository} (a deploy gives it the right), and, if account {ecr.account} is "
            "another, does the repository's own policy let it?"
        )
    if re.search(r"denied|unauthorized|authentication required", failure, re.IGNORECASE):
        return "The registry has no such image, or wants a login, which nodes have for ECR only. Correct it, or copy it to ECR."
    if re.search(r"manifest unknown|not found", failure, re.IGNORECASE):
        return "Correct the name, the tag or the digest."
    return "Is there a way to the registry? Isolated nodes have one to ECR in their own region only."
