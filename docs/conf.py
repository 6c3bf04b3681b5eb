"""Sphinx settings of the site: `python -m sphinx -W --keep-going docs build/site`.

To read the site: `python -m http.server -b 127.0.0.1 -d build/site`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

import jaxgpt

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import calls
import notebooks
import repository

project = "jaxgpt"
html_title = "jaxgpt"
version = release = jaxgpt.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.githubpages",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["*.py", "tools"]

# The setting of a hosted site: the URL of the repository, such as https://github.com/ME/jaxgpt; "": unknown. The clone command,
# the URL of the site and the Colab links are derived from it. `docs/tools/repository.py URL` sets it.
repository_url = repository.published()
html_baseurl = ""  # URL of the site; "": the GitHub Pages of the repository, if it is known

smartquotes = False  # two hyphens, not a dash, in options such as --out

html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "

# Execute the pages with cells, and cache their outputs. A failing cell stops the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# NEEDS_TORCH is a page with PyTorch code. The extra `docs` does not install PyTorch; without it, a note replaces outputs.
NEEDS_TORCH = "course/originals"
TORCH = find_spec("torch") is not None
nb_execution_excludepatterns = [] if TORCH else [f"{NEEDS_TORCH}*"]
nb_merge_streams = True
nb_render_markdown_format = "gfm"
html_math_renderer = "mathml"  # rendered by browsers without JavaScript
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4

default_role = "literal"  # role of single backquotes in docstrings: code, as in Markdown
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_use_legacy_class_based = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # one description per field, in the docstring of its class
napoleon_use_rtype = False
nitpicky = False


def setup(app: Any) -> None:
    """Render formulas as MathML, connect the hooks below, and omit fields that class docstrings describe."""
    app.add_config_value("repository_url", "", "env", [str])
    app.add_html_math_renderer("mathml", (_math, None), (_math_block, None))
    _quiet_kernels()
    app.connect("config-inited", _derive_site_url)
    app.connect("source-read", _insert_repository)
    app.connect("source-read", _note_missing_torch)
    app.connect("source-read", _insert_calls)
    app.connect("html-page-context", _link_notebook)
    app.connect("build-finished", _write_notebooks)
    app.connect("autodoc-skip-member", lambda app, what, name, obj, skip, options: skip or _is_field(obj))


def _quiet_kernels() -> None:
    """Set the log level of the notebook kernels to ERROR.

    Their warnings concern the transport, which is local, and the build prints its own progress.
    """
    kernel = Path(tempfile.mkdtemp(), "kernels", "python3")
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
    spec = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(kernel.parents[1]), os.environ.get("JUPYTER_PATH", "")])
    logging.getLogger("traitlets").setLevel(logging.WARNING)  # no INFO messages of the kernels' client


def _derive_site_url(app: Any, config: Any) -> None:
    if not config.html_baseurl:
        config.html_baseurl = repository.pages(config.repository_url)


def _insert_repository(app: Any, page: str, source: list[str]) -> None:
    url = app.config.repository_url
    if url:
        source[0] = repository.with_url(source[0], repository.current(), url)


def _note_missing_torch(app: Any, page: str, source: list[str]) -> None:
    if page == NEEDS_TORCH and not TORCH:
        title = "# Four decoders, each next to its original\n"
        note = "This site was built without PyTorch, so this page has no outputs and figures."
        fix = "To add the outputs, run `pip install torch` and build the site again."
        source[0] = source[0].replace(title, f"{title}\n:::{{warning}}\n{note} {fix}\n:::\n", 1)


def _insert_calls(app: Any, page: str, source: list[str]) -> None:
    if page == "code":
        source[0] = calls.insert(source[0])


def _link_notebook(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Link each course page with cells to its notebook and, if the repository is known, to Colab, below the title."""
    if not page.startswith("course/") or doctree is None:
        return
    if not notebooks.is_notebook(app.env.doc2path(page).read_text("utf-8")):
        return
    links = [f'<a href="{page.rpartition("/")[2]}.ipynb" download>Download as a notebook</a>']
    colab = repository.colab(app.config.repository_url, f"{page}.ipynb")
    if colab:
        links.append(f'<a href="{colab}">Open in Colab</a>')
    line = f'<p class="notebook">{" · ".join(links)}</p>'
    context["body"] = context["body"].replace("</h1>", f"</h1>{line}", 1)


def _write_notebooks(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        base = urljoin(app.config.html_baseurl, "course/") if app.config.html_baseurl else ""
        notebooks.write(Path(app.srcdir) / "course", Path(app.outdir) / "course", base)


def _math(translator: Any, node: Any) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise SkipNode


def _math_block(translator: Any, node: Any) -> None:
    translator.body.append(f"<p>{tex2mathml(node.astext(), as_block=True)}</p>")
    raise SkipNode


def _is_field(obj: object) -> bool:
    return type(obj).__name__ in ("_tuplegetter", "member_descriptor")
