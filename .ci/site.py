"""A hook of mkdocs: plots of bench/results become files of the site, and links out of docs/ URLs.

In the repository, pages link to files beside docs/ (`../README.md`, `../bench/results/x.svg`). The
site has only docs/ and the plots.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PLOTS = "bench/results"
LINK = re.compile(r"\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots."""
    for plot in sorted((ROOT / PLOTS).glob("*.svg")):
        path = f"{PLOTS}/{plot.name}"
        files.append(File.generated(config, path, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links lead to files of the site, or to the source."""
    folder = posixpath.dirname(page.file.src_uri)

    def site_link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if path.startswith("docs/"):
            return match[0]
        if path.startswith(PLOTS) and files.get_file_from_path(path):
            return f"]({posixpath.relpath(path, folder or '.')})"
        if not (ROOT / path).exists():
            raise ValueError(f"{page.file.src_uri}: {match[1]} is no file of the repository")
        return f"]({config.repo_url}/blob/main/{path}{match[2] or ''})" if config.repo_url else path

    return LINK.sub(site_link, markdown)
