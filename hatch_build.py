"""README.md as the long description of a package: nothing in it may point into the checkout.

Links and images become absolute from `Source` of [project.urls]. While the maintainer has set none,
links are left as their texts and images are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LOCAL = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Add the long description to the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source)}


def absolute(text: str, source: str | None) -> str:
    """Return Markdown whose local links lead to `source`, a repository as GitHub shows it."""

    def link(found: re.Match[str]) -> str:
        image, words, path = found.groups()
        if source is None:
            return "" if image else words
        return f"{image}[{words}]({source}/{'raw' if image else 'blob'}/HEAD/{path})"

    return LOCAL.sub(link, text)
