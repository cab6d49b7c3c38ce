"""The hard half of the text: Python's documentation sources and standard library, split by document."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .settings import DOCUMENTATION

HELD_OUT_SHARE = 1 / 16
MAXIMUM_BYTES = 400_000  # skips generated tables such as pydoc_data/topics.py


@dataclass(frozen=True)
class Document:
    """One file. `domain` is "docs" or "code"; `name` is its path inside its source."""

    domain: str
    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.blake2b(f"{self.domain}/{self.name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def load_documents() -> list[Document]:
    """All documents of both domains in a fixed order; deprecated and test material is left out."""
    if not DOCUMENTATION.is_dir():
        raise FileNotFoundError(
            f"{DOCUMENTATION} not found: install the Debian package python3.11-doc"
            " (apt-get install python3.11-doc), whose _sources folder is the documentation text."
        )
    library = Path(sysconfig.get_paths()["stdlib"])
    return [
        *_read(DOCUMENTATION, "**/*.rst.txt", "docs", skip=("whatsnew/changelog",)),
        *_read(
            library,
            "**/*.py",
            "code",
            skip=(
                "test/",
                "tests/",
                "site-packages",
                "lib2to3",
                "idlelib",
                "encodings/",
                "pydoc_data",
                "config-",
            ),
        ),
    ]


def _read(root: Path, pattern: str, domain: str, skip: tuple[str, ...]) -> list[Document]:
    documents = []
    for path in sorted(root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in skip) or path.stat().st_size > MAXIMUM_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").strip()
        if len(text) > 500:
            documents.append(Document(domain, name, text))
    return documents
