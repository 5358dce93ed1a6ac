"""The rules of the house that no linter knows: who may import whom, and what must not exist."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CDK = {"aws_cdk", "constructs", "jsii"}
ASK_AWS = {f"constructs/traincluster/{name}" for name in ("pins.py: boto3", "chaos.py: boto3")}
"""The commands `traincluster pin-image` and `chaos` talk to AWS, and import boto3 for that. No construct asks it anything."""


def imports_of(folder: str) -> Iterator[tuple[Path, str]]:
    """Every absolute import in the Python files below `folder`, as dotted names."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield path, node.module


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("training/trainrun", CDK | {"traincluster", "stacks", "trainlocal"}),
        ("local/trainlocal", CDK | {"traincluster", "stacks", "trainrun", "torch"}),
        ("constructs/traincluster", {"stacks", "trainlocal", "torch", "moto", "boto3"}),
        ("stacks", {"trainlocal", "torch", "boto3"}),
    ],
)
def test_dependencies_point_one_way(folder: str, forbidden: set[str]) -> None:
    found = list(imports_of(folder))
    assert found, f"no imports found below {folder}: has it moved?"
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in found if name.split(".")[0] in forbidden]
    assert [entry for entry in wrong if entry not in ASK_AWS] == []


@pytest.mark.parametrize("folder", ["constructs/traincluster", "stacks"])
def test_the_cdk_side_sees_of_trainrun_the_spec_only(folder: str) -> None:
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in imports_of(folder) if name.startswith("trainrun")]
    assert [entry for entry in wrong if not entry.endswith(": trainrun.spec")] == []


def test_the_documents_of_both_sides_need_the_standard_library_only() -> None:
    allowed = set(sys.stdlib_module_names) | {"trainrun"}
    package = ROOT / "training" / "trainrun"
    for document in (package / "spec.py", package / "config.py", package / "settings"):
        found = {module.split(".")[0] for file, module in imports_of("training/trainrun") if document in (file, file.parent)}
        assert found
        assert found <= allowed


def test_constructs_has_no_init_and_is_the_pypi_package() -> None:
    assert not (ROOT / "constructs" / "__init__.py").exists()
    code = "import constructs; print(constructs.__file__); constructs.Construct"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert "site-packages" in answer.stdout


@pytest.mark.parametrize("module", ["trainrun.spec", "trainrun.node", "trainrun.store", "trainlocal", "trainrun"])
def test_what_must_start_fast_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0


def test_no_construct_loads_what_asks_aws() -> None:
    asking = "{'boto3', 'traincluster.pins', 'traincluster.chaos'} & set(sys.modules)"
    code = f"import sys, traincluster.cluster, traincluster.command; sys.exit(bool({asking}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0
