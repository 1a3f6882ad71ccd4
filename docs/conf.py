"""How Sphinx builds the site from these pages: `make docs`.

The pages are Markdown (MyST), so that a code host shows them too. Links to files outside of this folder, such as
../examples/train_lm.py, become downloads, so they work in the site as well. Nothing is fetched from the network.
"""

from typing import Any

from sphinx.pycode import ModuleAnalyzer

from cce_kernels.version import installed

project = "cce-jax"
author = "The cce-jax developers"
release = version = installed()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = "cce-jax"
html_static_path = ["theme"]
html_css_files = ["wide.css"]
html_favicon = "theme/favicon.svg"
html_show_sphinx = False
html_show_copyright = False

myst_heading_anchors = 4  # so that [a section](page.md#its-title) is a link here as on a code host
suppress_warnings = ["misc.highlighting_failure"]

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # each argument's type stands in its own line; the signature shows the defaults
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # prose, where napoleon takes what stands before a colon for a type
default_role = "code"  # docstrings write `name`, as Markdown does


def code_blocks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes an indented block after an empty line a code block, as Markdown does: docstrings are written so."""
    found: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and found and not found[-1].strip():
            found += ["::", ""]
        inside = indented or (inside and not line.strip())
        found.append(line)
    lines[:] = found


def setup(app: Any) -> None:
    # Without their overloads the functions show one signature, with the defaults. autodoc has no setting for that.
    for module in ("cce_jax.api", "cce_torch.api", "cce_torch.head"):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()
    app.connect("autodoc-process-docstring", code_blocks, priority=100)  # before napoleon, at 500
