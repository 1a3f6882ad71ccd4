"""The documentation: its links, its table of contents, the version that it names, and its code, all of which runs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks, run

INDEX = ROOT / "docs" / "index.md"
ON_SEVERAL_DEVICES = ("devices.md",)  # run in a process of its own, which has eight


def anchors(page: Path) -> set[str]:
    """What links can lead to in a page: its headings, as code hosts and MyST write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_every_page_is_in_the_table_of_contents_and_linked_from_the_first_page():
    text = INDEX.read_text()
    contents = re.findall(r"[\w-]+", " ".join(re.findall(r"^```{toctree}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    for page in INDEX.parent.glob("*.md"):
        assert page == INDEX or (page.stem in contents and f"]({page.name})" in text), page.name


def test_the_readme_leads_to_the_documentation_and_is_short():
    text = (ROOT / "README.md").read_text()
    assert "(docs/index.md)" in text
    assert text.count("\n") < 120


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page) and page.name not in ON_SEVERAL_DEVICES], ids=lambda page: page.name
)
def test_code_runs(page, recwarn):
    run(page)
    assert not [said for said in recwarn if "os.fork" in str(said.message)]  # as a DataLoader's workers may be


def test_nothing_says_to_install_the_package_from_a_registry():
    texts = [*PAGES, *ROOT.glob("cce_*/**/*.py"), *ROOT.glob("examples/**/*.py")]
    assert not [path.name for path in texts if re.search(r"install [^`\n]*\bcce-jax", path.read_text())]


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_install_tables_serve_jax_pytorch_and_hugging_face(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r'`(?:pip install )?"\.\[([\w,]+)\]"`', (ROOT / page).read_text())
    assert {"cuda13", "cuda12", "cuda13,torch", "cuda13,hf", "hf"} <= set(named)
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


@pytest.mark.parametrize("target", ["demo", "test", "docs"])
@pytest.mark.parametrize("gpu", ["", ",cuda13"])
def test_make_says_what_pytorch_brings_before_it_installs_it(target, gpu, tmp_path):
    command = ["make", "--dry-run", target, f"VENV={tmp_path}", f"GPU={gpu}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    notice, installs = said.index(f'test -n "{gpu}" ||'), said.index("pip install -q -c constraints.txt -e")
    assert said.index("This takes some minutes") < notice < said.index("CPU build") < installs


def test_the_quick_start_has_the_words_that_people_search_for():
    text = (ROOT / "docs" / "quick-start.md").read_text().lower()
    assert all(word in text for word in ("gradient accumulation", "tied", "shifted twice", "padding"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_is_one_that_runs(page):
    assert len(re.findall(r"```\s*(?:py|jax|torch)", page.read_text())) == len(blocks(page))


def test_code_for_several_devices_runs():
    pages = [str(page) for page in PAGES if page.name in ON_SEVERAL_DEVICES]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join((".", "kernels")),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.pages", *pages]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def test_citation_and_changelog_are_of_the_packages_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"(?m)^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text())
    assert newest
    assert newest[1] in (version, "Unreleased")
