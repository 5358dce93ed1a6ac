"""The emulated resource types, one module a subject. Importing the package makes them known to the engine."""

from trainlocal.cloud.resources import (
    autoscaling,
    cdk,
    cloudwatch,
    ec2_endpoints,
    ec2_gateways,
    ec2_launch,
    ec2_network,
    ec2_security,
    ecr,
    iam,
    kms,
    logs,
    s3,
    sns,
    ssm,
)
from trainlocal.cloud.resources.provider import NOTHING, Place, Provider, emulated_types, provider_of

__all__ = [
    "NOTHING",
    "Place",
    "Provider",
    "autoscaling",
    "cdk",
    "cloudwatch",
    "ec2_endpoints",
    "ec2_gateways",
    "ec2_launch",
    "ec2_network",
    "ec2_security",
    "ecr",
    "emulated_types",
    "iam",
    "kms",
    "logs",
    "provider_of",
    "s3",
    "sns",
    "ssm",
]
