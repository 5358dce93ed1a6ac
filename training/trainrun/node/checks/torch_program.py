"""What a node's check runs with the job's own Python: versions, devices, and a product of matrices on each, told as JSON.

It is handed over as text (``python -c``), because that Python may be a container's, which sees none of this. So it imports
the standard library and torch, and nothing of trainrun. One process does all of it: importing torch is what takes the time.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import Any

SIZE = 1024
"""Of the square matrices."""


def versions(torch: Any) -> dict[str, Any]:
    """What torch was built with, and the Neuron packages that are there."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if torch.version.cuda:
        try:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception:
            found["nccl"] = ""
    for package in ("torch-neuronx", "neuronx-cc"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def devices(torch: Any) -> list[str]:
    """The accelerators that torch can use: ["cuda:0", ...]."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type
    return [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]


def multiply(torch: Any, device: str, a: Any, b: Any, expected: Any, results: dict[str, Any]) -> None:
    """Multiply on a device, and compare.

    The matrices hold whole numbers from -4 to 4: every sum of their products is exact in single precision and in TF32,
    whatever its order, so that equal means equal.
    """
    started = time.monotonic()
    try:
        product = (a.to(device) @ b.to(device)).cpu()
        wrong = int((product != expected).sum())
        results[device] = {"seconds": time.monotonic() - started, "wrong": wrong, "error": ""}
    except Exception as error:
        results[device] = {"seconds": time.monotonic() - started, "wrong": 0, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    patience = float(sys.argv[1])
    started = time.monotonic()
    import torch

    found = {**versions(torch), "import_seconds": time.monotonic() - started, "devices": [], "products": {}, "error": ""}
    try:
        if torch.version.cuda and not torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]  # says why
        found["devices"] = devices(torch)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    if found["devices"]:
        generator = torch.Generator().manual_seed(1)
        a, b = (torch.randint(-4, 5, (SIZE, SIZE), generator=generator).float() for _ in range(2))
        expected = a @ b
        results: dict[str, Any] = {}
        threads = [
            threading.Thread(target=multiply, args=(torch, device, a, b, expected, results), daemon=True)
            for device in found["devices"]
        ]
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        found["products"] = dict(results)  # a device that hangs is missing in it
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # a thread that hangs in a driver must not keep this process


if __name__ == "__main__":
    main()
