"""The documentation's links, and the version that it names."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_reached_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in text] == []


def test_citation_and_changelog_are_of_the_packages_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"(?m)^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text())
    assert newest
    assert newest[1] in (version, "Unreleased")
