"""Adds the project's URLs to a package, from the variables that mkdocs.yml reads too."""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Called by hatchling; without the variables, a package has no URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the URLs."""
        site, repository = os.environ.get("SITE_URL"), os.environ.get("REPO_URL")
        urls = {"Documentation": site} if site else {}
        if repository:
            urls |= {"Source": repository, "Issues": f"{repository}/issues"}
            urls["Changelog"] = f"{repository}/blob/main/CHANGELOG.md"
        metadata["urls"] = urls
